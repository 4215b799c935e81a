"""Ways to get bytes to their place, best first; the choice and its reason are marks of the load.

A  child process, shared ring, registered slot by slot
B  no child or no shared memory: threads of this process, private ring with huge pages, registered
C  registration refused: ring allocated by the driver, threads of this process
D  pinned memory refused: pageable slots, synchronous copies
E  CPU: the reader writes into host arenas (child, or threads where a child is refused)
"""

from __future__ import annotations

from loader.errors import CapabilityError
from loader.options import StreamOptions
from loader.reader_link import ReaderLink, ThreadReader, spawn_reader


def open_host_reader(options: StreamOptions) -> tuple[ReaderLink, str]:
    """A reader for rung E and why it is this one. Raises: CapabilityError: what was forced is not possible."""
    if options.path not in (None, "E"):
        raise CapabilityError(
            "path needs a CUDA device", where="path", found=options.path, expected="E on the CPU"
        )
    if options.reader == "threads":
        return ThreadReader(), "forced"
    try:
        return spawn_reader(), "forced" if options.reader else "first choice"
    except OSError as error:
        if options.reader == "child":
            raise CapabilityError(
                str(error), where="reader", hint="leave the option out to read in threads"
            ) from error
        return ThreadReader(), str(error)
