"""The CPU transport: the reader writes straight into host arenas, a thread counts what arrived."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from loader import reader as wire
from loader.arena import DeviceArena, HostArena
from loader.errors import CapabilityError, InternalError, WorkerError
from loader.intake import Intake, Record
from loader.progress import LoadProgress, closed_error
from loader.reader_link import ReaderLink, end_links
from loader.row_gather import RowDesk

_REPORT_S = 5.0


class Transport(Protocol):
    """What a stream needs from whoever fills its arenas."""

    @property
    def path(self) -> str:
        """Rung of the ladder, see `loader.ladder`."""
        ...

    def start(self) -> None:
        """Raises: InternalError: no thread here; it has released everything then, and is of no further use."""
        ...

    def arena(self, index: int) -> HostArena | DeviceArena:
        """After a group of that arena is ready."""
        ...

    def order_after(self, group: int, cuda_stream: int | None) -> None:
        """Make a CUDA stream (None = the caller's current one) wait for a ready group; nothing on the CPU."""
        ...

    def forget(self, index: int) -> None:
        """Drop an arena; only its views keep it."""
        ...

    def close(self) -> None:
        """Stop at a safe point and release everything but handed-out memory. May be called again."""
        ...


class Patience:
    """Reports a slow load every 5 s and gives up after `max_load_s`."""

    def __init__(self, progress: LoadProgress, total_bytes: int, max_load_s: float | None) -> None:
        self._progress = progress
        self._total = total_bytes
        self._max = max_load_s
        self._begin = time.monotonic()
        self._next = self._begin + _REPORT_S

    def left_ms(self) -> int:
        """How long to wait before `check` again."""
        limit = self._next if self._max is None else min(self._next, self._begin + self._max)
        return max(0, int((limit - time.monotonic()) * 1000) + 1)

    def check(self) -> None:
        """Raises: CapabilityError: the deadline has passed."""
        now = time.monotonic()
        size = self._progress.arrived_bytes
        elapsed = now - self._begin
        if now >= self._next:
            self._next = now + _REPORT_S
            self._progress.mark(f"loading: {size} of {self._total} bytes after {elapsed:.1f} s", size=size)
        if self._max is not None and elapsed > self._max:
            rate = size / elapsed
            expected = f"{self._total / rate:.1f} s" if rate else "no first byte yet"
            raise CapabilityError(
                f"storage is too slow: {size} of {self._total} bytes after {elapsed:.1f} s",
                where="max_load_s",
                found=f"{rate / 1e9:.3f} GB/s, expected time {expected}",
                expected=f"{self._max} s",
                hint="raise the limit, or keep the weights on faster storage",
            )


def forgotten_error() -> InternalError:
    return InternalError("arena was given up with forget()", hint="keep components that are used again")


def start_thread(thread: threading.Thread, release: Callable[[], None]) -> None:
    """Start a transport's thread. Raises: InternalError: the system grants none; `release` was called then."""
    try:
        thread.start()
    except RuntimeError as error:
        release()
        raise InternalError(
            f"no thread to load with: {error}",
            where=thread.name,
            hint="raise the limit of processes and threads",
        ) from error


def failure_of(error: Exception, what: str, where: str) -> WorkerError:
    """What all who wait are told of a transport's thread that ended: one of ours as it is, another as the cause."""
    if isinstance(error, WorkerError):
        return error
    failure = InternalError(f"{what}: {error!r}", where=where)
    failure.__cause__ = error
    return failure


def iter_records(data: bytes) -> Iterator[Record]:
    yield from wire.RECORD.iter_unpack(data)


class _Refused(Exception):
    """The reader's process does not run here."""


class Collector:
    """Reads records until the reader ends; then fails or has been closed. Owns the link.

    Args:
        fall: makes another reader and its arenas, for a process that ends before its first word; None = there is none.
    """

    path = "E"

    def __init__(
        self,
        link: ReaderLink,
        arenas: Sequence[HostArena],
        intake: Intake,
        progress: LoadProgress,
        rows: RowDesk,
        patience: Patience,
        fall: Callable[[str], tuple[ReaderLink, list[HostArena]]] | None = None,
    ) -> None:
        self._fall = fall
        self._lock = threading.Lock()
        self._is_settled = (
            threading.Event()
        )  # the reader has spoken, so that these arenas are the ones it fills
        self._link = link
        self._arenas: dict[int, HostArena] = dict(enumerate(arenas))
        self._intake = intake
        self._progress = progress
        self._rows = rows
        self._patience = patience
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="coldframe-collector", daemon=True)

    def start(self) -> None:
        start_thread(self._thread, self._release)

    def _release(self) -> None:
        end_links(self._link)
        self._arenas.clear()

    def arena(self, index: int) -> HostArena:
        if index not in self._arenas:
            raise self._progress.failure or forgotten_error()
        return self._arenas[index]

    def forget(self, index: int) -> None:
        self._arenas.pop(index, None)

    def order_after(self, group: int, cuda_stream: int | None) -> None:
        self._is_settled.wait()  # only a group without bytes comes before

    def close(self) -> None:
        self._progress.fail(closed_error())
        self._rows.fail(closed_error())
        with self._lock:
            self._is_closing = True
        self._link.stop()
        self._thread.join()
        self._link.close()
        self._arenas.clear()

    def _run(self) -> None:
        try:
            try:
                self._collect()
            except _Refused as refused:
                self._next_reader(str(refused))
        except Exception as error:  # noqa: BLE001 - border of a thread: reported to everyone who waits
            self._fail(failure_of(error, "collector failed", "loader.collector"))
        finally:
            self._is_settled.set()

    def _next_reader(self, reason: str) -> None:
        assert self._fall is not None, "a forced reader does not fall"
        with self._lock:
            if self._is_closing:
                return
            self._link.close()
            self._link, arenas = self._fall(reason)
            self._arenas = dict(enumerate(arenas))
            self._fall = None
        self._collect()

    def _collect(self) -> None:
        poll = select.poll()
        poll.register(self._link.records_fd, select.POLLIN)
        while True:
            if not self._intake.is_done:
                while not poll.poll(self._patience.left_ms()):
                    self._patience.check()
                self._patience.check()
            data = self._link.read_records()
            if not data:
                return self._at_end()
            self._is_settled.set()
            for record in iter_records(data):
                if record[0] in (wire.FULL, wire.HASHED):
                    self._arrived(record)
                else:
                    self._intake.handle(record)

    def _arrived(self, record: Record) -> None:
        _, chunk, _, _, _, start, end, _, _, checked = record
        complete = self._progress.arrived(chunk, start, end, checked == wire.WHOLE)
        if complete:
            self._progress.mark_ready(complete)

    def _at_end(self) -> None:
        if self._is_closing:
            return
        if self._fall is not None and not self._is_settled.is_set():
            ending = self._link.stop(grace_s=1.0, drain=True)
            raise _Refused(f"no reader process: it ended before its first word: {ending}")
        error = self._intake.reader_gone()
        if not self._intake.is_done:
            raise error
        self._rows.fail(error)  # everything has arrived; only rows cannot be had any more
        self._link.stop()

    def _fail(self, error: WorkerError) -> None:
        """Leave nothing behind, then tell everyone."""
        self._link.stop(drain=True)
        self._arenas.clear()
        self._progress.fail(error)
        self._rows.fail(error)
