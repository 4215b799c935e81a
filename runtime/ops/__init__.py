"""Layers shared by families: norms, rotary embeddings, attention. Imports torch at the top."""
