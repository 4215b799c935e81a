"""Benches: each writes its figures and targets to `results/` as JSON."""
