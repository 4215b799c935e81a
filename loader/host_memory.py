"""Private host memory for a ring that only threads of this process fill."""

from __future__ import annotations

import mmap


def private_memory(size: int) -> mmap.mmap:
    """Anonymous memory in huge pages where the kernel allows them.

    Measured on an H200 host (`host_memory` of the benches), 13 threads, against shared memory: the first fill is three
    times faster (13 instead of 4.4 GB/s), and nobody pins pages that only another process has mapped (0.16 instead of
    0.06 s a GiB).
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return memory  # the kernel has them switched off
    return memory
