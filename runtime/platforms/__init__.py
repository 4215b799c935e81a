"""What the deployments of other hosts call. Modules here import their platform inside functions only."""
