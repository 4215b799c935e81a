"""Pictures in, MP4 out."""
