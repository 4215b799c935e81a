"""Published checkpoint in, prepared directory out."""
