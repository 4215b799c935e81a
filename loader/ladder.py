"""Ways to get bytes to their place, best first; the choice and its reason are marks of the load.

A  child process, shared ring, registered slot by slot
B  no child or no shared memory: threads of this process, private ring with huge pages, registered
C  registration refused: ring allocated by the driver, threads of this process
D  pinned memory refused: pageable slots, synchronous copies
E  CPU: the reader writes into host arenas (child, or threads where a child is refused)
"""

from __future__ import annotations

from collections.abc import Callable

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


def open_device_reader(
    options: StreamOptions, reader: ReaderLink | None, begin: Callable[[ReaderLink], None]
) -> tuple[str, ReaderLink | None, str]:
    """First rung of a CUDA load: (path, its reader already at work, reason). Path C has none yet: it needs the context.

    Args:
        reader: one that was spawned before the plan was known.
        begin: starts a reader on the plan.
    Raises: CapabilityError: what was forced is not possible.
    """
    path = options.path
    if path == "E":
        raise CapabilityError("path E is for the CPU", where="path", found=path, expected="A, B, C, D")
    if reader is not None and (path in ("B", "C") or options.reader == "threads"):
        reader.stop()
        reader.close()
        reader = None
    if path == "C":
        return "C", None, "forced"
    if path == "B" or options.reader == "threads":
        return path or "B", _begin(ThreadReader(), begin), "forced"
    try:
        link = reader or spawn_reader()
        return path or "A", _begin(link, begin), "forced" if path else "first choice"
    except OSError as error:
        if path == "A" or options.reader == "child":
            raise CapabilityError(
                str(error), where="path A", hint="leave path and reader out to fall back"
            ) from error
        return path or "B", _begin(ThreadReader(), begin), str(error)


def _begin(link: ReaderLink, begin: Callable[[ReaderLink], None]) -> ReaderLink:
    try:
        begin(link)
    except OSError:
        link.stop()
        link.close()
        raise
    return link
