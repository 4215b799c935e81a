"""Data files: manifest schema, pinned tensor lists of the model families, step schedules, acceleration profiles."""
