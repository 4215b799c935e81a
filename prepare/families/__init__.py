"""Prepare recipes, one module per model family."""
