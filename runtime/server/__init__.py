"""HTTP service in front of one worker process. Nothing in here imports torch."""
