"""One worker: start, one request at a time, MP4 out. Importing it imports nothing else."""
