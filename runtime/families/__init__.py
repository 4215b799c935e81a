"""Model families, one folder each, found through `runtime.family`."""
