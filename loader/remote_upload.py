"""The CUDA transport of path U: another process uploads, this one counts what it reports and maps its memory.

One thread, which sleeps in the kernel nearly always, so that it hardly competes with an import. Groups are ready when
their copies are complete: no stream has to wait for an event. Until the first chunk was reported, a refusal or the end
of the process chooses path A instead.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable

from loader import reader as wire
from loader import upload_wire as talk
from loader.arena import DeviceArena, HostArena, import_arena
from loader.collector import Patience, Transport, failure_of, forgotten_error, iter_records, start_thread
from loader.driver import Importer
from loader.errors import InternalError, WorkerError
from loader.intake import Intake
from loader.load_plan import LoadPlan
from loader.progress import LoadProgress, closed_error
from loader.reader_link import ReaderLink
from loader.row_gather import RowDesk
from loader.uploader_link import UploaderProcess


class _Refused(Exception):
    """Path U is not possible here."""


class RemoteUpload:
    """Owns the uploader process and the reader, both at work already.

    Args:
        make_importer: the driver calls of this process; made on the transport's thread.
        fall: makes the transport of the next rung, with a reader of its own; None = path U is forced.
    """

    def __init__(
        self,
        plan: LoadPlan,
        process: UploaderProcess,
        link: ReaderLink,
        make_importer: Callable[[], Importer],
        intake: Intake,
        progress: LoadProgress,
        rows: RowDesk,
        patience: Patience,
        fall: Callable[[], Transport] | None,
    ) -> None:
        self._plan = plan
        self._process = process
        self._link = link
        self._make_importer = make_importer
        self._intake = intake
        self._progress = progress
        self._rows = rows
        self._patience = patience
        self._fall = fall
        self._lock = threading.Lock()
        self._importer: Importer | None = None
        self._context = 0
        self._arenas: dict[int, DeviceArena] = {}
        self._has_loaded = False
        self._next: Transport | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="coldframe-upload", daemon=True)

    @property
    def path(self) -> str:
        return "U" if self._next is None else self._next.path

    def start(self) -> None:
        start_thread(self._thread, self._end)

    def arena(self, index: int) -> HostArena | DeviceArena:
        if self._next is not None:
            return self._next.arena(index)
        if index not in self._arenas:
            raise self._progress.failure or forgotten_error()
        return self._arenas[index]

    def forget(self, index: int) -> None:
        if self._next is not None:
            self._next.forget(index)
        else:
            self._arenas.pop(index, None)

    def order_after(self, group: int, cuda_stream: int | None) -> None:
        """Nothing on path U: a ready group's copies are complete."""
        if self._next is not None:
            self._next.order_after(group, cuda_stream)

    def close(self) -> None:
        self._progress.fail(closed_error())
        self._rows.fail(closed_error())
        with self._lock:
            self._is_closing = True
        self._process.hang_up()
        self._link.stop()
        self._thread.join()
        if self._next is not None:
            self._next.close()
        self._end()
        self._arenas.clear()

    def _end(self) -> None:
        self._process.stop()
        self._process.close()
        self._link.stop()
        self._link.close()

    # -- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._upload()
        except Exception as error:  # noqa: BLE001 - border of a thread: reported to everyone who waits
            self._fail(failure_of(error, "upload failed", "loader.remote_upload"))

    def _upload(self) -> None:
        try:
            self._receive()
            self._answer_rows()
        except _Refused as refused:
            self._next_rung(str(refused))

    def _receive(self) -> None:
        """Until everything is on the device or the stream was closed."""
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        while True:
            while not poll.poll(self._patience.left_ms()):
                self._patience.check()
            self._patience.check()
            packet = self._process.receive()
            if packet is None:
                if self._is_closing or self._progress.is_complete:  # nothing is lost but rows
                    return
                raise self._ended(self._process.stop())
            if packet[0] == talk.DONE:
                return self._process.say_bye()
            self._handle(*packet)

    def _handle(self, kind: int, payload: bytes, fds: list[int]) -> None:
        if kind == talk.NEWS:
            for record in iter_records(payload):
                self._intake.handle(record)
        elif kind == talk.LOADED:
            self._loaded(payload)
        elif kind == talk.MARK:
            name, start, end, size = talk.decode_mark(payload)
            self._progress.mark(name, start, end, size, thread="uploader process")
        elif kind == talk.CONTEXT:
            self._open_context()
        elif kind == talk.ARENAS:
            self._import(payload, fds)
        elif kind == talk.REFUSED:
            raise self._refusal(talk.decode_error(payload))
        elif kind == talk.FAILED:
            raise talk.decode_error(payload)
        elif kind == talk.GONE:
            raise self._intake.reader_gone()
        else:
            raise InternalError("unknown packet", where="loader.upload_process", found=kind)

    def _loaded(self, payload: bytes) -> None:
        (done_ns,) = talk.TIME.unpack_from(payload)
        self._has_loaded = True
        complete: list[int] = []
        for record in iter_records(payload[talk.TIME.size :]):
            complete += self._progress.arrived(record[1], record[5], record[6], record[9] == wire.WHOLE)
        if complete:
            self._progress.mark_ready(complete, done_ns)

    def _open_context(self) -> None:
        """The device's primary context in this process, made while torch is imported; torch finds it later."""
        start = time.monotonic_ns()
        try:
            importer = self._make_importer()
            self._context = importer.retain_context(self._process.ordinal)
        except WorkerError as error:
            raise self._refusal(error) from error
        self._importer = importer
        self._progress.mark("cuda context", start)

    def _import(self, payload: bytes, fds: list[int]) -> None:
        start = time.monotonic_ns()
        importer = self._importer
        assert importer is not None, "CONTEXT comes before ARENAS"
        sizes = [mapped for (mapped,) in talk.TIME.iter_unpack(payload)]
        try:
            importer.use_context(self._context)
            for index, (arena, mapped, fd) in enumerate(zip(self._plan.arenas, sizes, fds, strict=True)):
                self._arenas[index] = import_arena(
                    arena.name, arena.bytes, mapped, fd, importer, self._process.ordinal, self._context
                )
        except WorkerError as error:
            raise self._refusal(error) from error
        finally:
            for fd in fds:
                os.close(fd)
        self._progress.mark("arenas imported", start, size=self._plan.arena_bytes)

    def _ended(self, ending: str) -> Exception:
        """The process is gone although nobody stopped it."""
        error = InternalError(
            f"uploader process ended before its work was done: {ending}",
            where="loader.upload_process",
            found=f"{self._progress.arrived_bytes} of {self._plan.total_bytes} bytes",
            hint="restart the worker; exit by signal 9 often means the container is out of memory",
        )
        return error if self._has_loaded else self._refusal(error)

    def _refusal(self, error: WorkerError) -> Exception:
        return error if self._fall is None else _Refused(str(error))

    def _next_rung(self, reason: str) -> None:
        assert self._fall is not None, "a forced path does not fall"
        self._progress.mark(f"path U refused: {reason}")
        self._arenas.clear()
        self._end()
        with self._lock:
            if self._is_closing:
                return
            transport = self._next = self._fall()
        try:
            transport.start()
        except BaseException:
            self._next = None  # it has released what it held
            raise

    def _answer_rows(self) -> None:
        """After the load: the process ends, the reader stays for row gathers until the stream is closed."""
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        poll.register(self._link.records_fd, select.POLLIN)
        process = self._process.fileno()
        while not self._is_closing:
            ready = [fd for fd, _ in poll.poll()]
            if process in ready:
                poll.unregister(process)
                ending = self._process.stop()
                if ending != "exit code 0" and not self._is_closing:
                    self._progress.mark(f"warning: uploader process ended with {ending}")
            if self._link.records_fd not in ready:
                continue
            data = self._link.read_records()
            if not data:
                if not self._is_closing:
                    self._rows.fail(self._intake.reader_gone())
                return
            for record in iter_records(data):
                self._intake.handle(record)

    def _fail(self, error: WorkerError) -> None:
        """Leave nothing behind, then tell everyone, also if that does not succeed."""
        try:
            self._process.stop()
            self._link.stop()
            self._arenas.clear()
        finally:
            self._progress.fail(error)
            self._rows.fail(error)
