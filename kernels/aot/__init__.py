"""Triton sources and their ahead-of-time compiler; imported by prepare only."""
