"""Ways to get bytes to their place, best first; the choice and its reason are marks of the load.

U  an uploader in a process of its own, whose device memory is mapped here and whose threads read; or the reader is a
   child with a shared ring
A  child process, shared ring, registered slot by slot; the uploader is a thread of this process
B  no child or no shared memory: threads of this process, private ring with huge pages, registered
C  registration refused: ring allocated by the driver, threads of this process
D  pinned memory refused: pageable slots, synchronous copies
E  CPU: the reader writes into host arenas (child, or threads where a child is refused)
"""

from __future__ import annotations

from collections.abc import Callable

from loader.errors import CapabilityError
from loader.options import StreamOptions
from loader.reader_link import ReaderLink, ThreadReader, begun, end_links, spawn_reader
from loader.upload_wire import MOST_FDS
from loader.uploader_link import UploaderProcess, spawn_uploader


def open_host_reader(options: StreamOptions, reader: ReaderLink | None) -> tuple[ReaderLink, str]:
    """A reader for rung E and why it is this one.

    Args:
        reader: one that was spawned before the plan was known; ended if it is not what is forced.
    Raises: CapabilityError: what was forced is not possible.
    """
    if options.path not in (None, "E"):
        raise CapabilityError(
            "path needs a CUDA device", where="path", found=options.path, expected="E on the CPU"
        )
    if reader is not None and options.reader in (None, reader.kind):
        return reader, "reader was started before"
    end_links(reader)
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


def open_uploader(
    options: StreamOptions,
    ordinal: int,
    num_arenas: int,
    reader: ReaderLink | None,
    uploader: UploaderProcess | None,
) -> tuple[UploaderProcess | None, str]:
    """A process for path U and why; (None, "") where another path was forced.

    Args:
        reader, uploader: what was started before the plan was known; an uploader that is of no use here is ended.
    Raises: OSError: says why path U is not possible.
    """
    reason = ""
    if options.path not in (None, "U"):
        reason = "another path is forced"
    elif options.reader == "threads":
        reason = "the reader is forced to be threads of this process"
    elif reader is not None and not reader.can_share:
        reason = f"the reader is of kind {reader.kind}"
    elif options.driver is not None and not options.uploader_driver:
        reason = "the driver exists in this process only"
    elif num_arenas > MOST_FDS:
        reason = f"{num_arenas} arenas, {MOST_FDS} descriptors can be sent"
    is_usable = uploader is not None and (uploader.ordinal, uploader.driver) == (
        ordinal,
        options.uploader_driver,
    )
    if uploader is not None and (reason or not is_usable):
        uploader.stop(grace_s=0.0)
        uploader.close()
        uploader = None
    if options.path not in (None, "U"):
        return None, ""
    if reason:
        raise OSError(reason)
    process = uploader or spawn_uploader(f"cuda:{ordinal}", options.uploader_driver)
    return process, "forced" if options.path else "first choice"


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
        raise CapabilityError("path E is for the CPU", where="path", found=path, expected="U, A, B, C, D")
    if reader is not None and (path in ("B", "C") or options.reader == "threads"):
        end_links(reader)
        reader = None
    if path == "C":
        return "C", None, "forced"
    if path == "B" or options.reader == "threads":
        return path or "B", begun(ThreadReader(), begin), "forced"
    try:
        link = reader or spawn_reader()
        return path or "A", begun(link, begin), "forced" if path else "first choice"
    except OSError as error:
        if path == "A" or options.reader == "child":
            raise CapabilityError(
                str(error), where="path A", hint="leave path and reader out to fall back"
            ) from error
        return path or "B", begun(ThreadReader(), begin), str(error)
