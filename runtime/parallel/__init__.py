"""Sequence and tensor parallelism over torch.distributed. Imports torch at the top."""
