"""Modal and fal applications."""
