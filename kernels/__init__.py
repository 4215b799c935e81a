"""Operators of the model families: eager reference forms, and precompiled kernels where a GPU is present."""
