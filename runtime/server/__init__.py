"""HTTP service. Never imports torch."""
