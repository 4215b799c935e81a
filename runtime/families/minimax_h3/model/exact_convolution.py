"""Convolutions in true float32 with repeatable results.

cuDNN's default lets float32 convolutions run in TF32, about three decimal digits; both autoencoders were released for
full float32. Matrix products need nothing: torch's default for them is full float32 already.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# The flags are the process's: two threads that saved and restored them in turn could run with TF32 or leave it off.
_flags = threading.RLock()


@contextmanager
def exact_convolutions() -> Iterator[None]:
    """Inside: no TF32, deterministic cuDNN algorithms, no timing-dependent choice. One thread at a time."""
    with (
        _flags,
        torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False),
    ):
        yield
