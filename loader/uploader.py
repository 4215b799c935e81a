"""One thread that copies full slots to the device and tells when groups are there.

Order, which is all that keeps bytes right: records → first-time slots are pinned → copies on one stream → one event for
the batch → events of completed groups → only then is the group announced. A slot goes back to the reader after the event
that was recorded after its copy is seen complete. At the end and after a failure: no more copies, synchronise the copy
stream, then unpin, unmap, end the reader.
"""

from __future__ import annotations

import select
import sys
import threading
from collections import deque
from collections.abc import Callable

from loader import reader as wire
from loader.arena import DeviceArena
from loader.collector import Patience, failure_of, forgotten_error, iter_records, start_thread
from loader.device_session import DeviceSession
from loader.driver import Driver, InContext
from loader.errors import WorkerError
from loader.intake import Intake, Record
from loader.load_plan import LoadPlan
from loader.progress import LoadProgress, closed_error
from loader.reader_link import ReaderLink, end_links
from loader.row_gather import RowDesk
from loader.slots import SlotStack

_POLL_MS = 1  # while copies are in flight
_SWITCH_INTERVAL_S = (
    1e-4  # each driver call may have to wait this long for the interpreter lock during an import
)


class Uploader:
    """The CUDA transport.

    Args:
        open_session: called on its thread: it makes context, arenas and ring.
        link: the reader that the session takes over, if one is at work already.
        make_slots: the books of a ring whose slots are all with the reader.
    """

    def __init__(
        self,
        plan: LoadPlan,
        ordinal: int,
        path: str,
        open_session: Callable[[], DeviceSession],
        link: ReaderLink | None,
        intake: Intake,
        progress: LoadProgress,
        rows: RowDesk,
        patience: Patience,
        make_slots: Callable[[], SlotStack],
    ) -> None:
        self._plan = plan
        self._make_slots = make_slots
        self._slots = make_slots()
        self._ordinal = ordinal
        self._first_path = path
        self._open_session = open_session
        self._link = link
        self._intake = intake
        self._progress = progress
        self._rows = rows
        self._patience = patience
        self._lock = threading.Lock()
        self._session: DeviceSession | None = None
        self._group_events: dict[int, int] = {}
        self._spare_events: list[int] = []
        self._in_flight: deque[tuple[int, list[int]]] = deque()
        self._waiting: deque[Record] = deque()  # for a place to unpack in
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="coldframe-uploader", daemon=True)

    @property
    def path(self) -> str:
        session = self._session
        return self._first_path if session is None else session.path

    def start(self) -> None:
        start_thread(self._thread, lambda: end_links(self._link))

    def arena(self, index: int) -> DeviceArena:
        arenas = self._live_session().arenas
        if index not in arenas:
            raise forgotten_error()
        return arenas[index]

    def forget(self, index: int) -> None:
        self._live_session().arenas.pop(index, None)

    def order_after(self, group: int, cuda_stream: int | None) -> None:
        """Make the caller's stream wait for the group's event, which `LoadProgress.wait` knows to be recorded."""
        with self._lock:
            session, event = self._live_session(), self._group_events.get(group)
            if event is None:  # a group without bytes
                return
            driver = session.driver
            with InContext(driver, session.context):
                stream = driver.caller_stream(self._ordinal) if cuda_stream is None else cuda_stream
                driver.stream_wait_event(stream, event)

    def close(self) -> None:
        self._progress.fail(closed_error())
        self._rows.fail(closed_error())
        self._closing.set()
        with self._lock:
            session = self._session
        if session is not None:
            session.stop_reader()
        self._thread.join()
        with self._lock:
            self._release_events()
            if self._session is not None:
                self._session.close()
            self._session = None

    def _live_session(self) -> DeviceSession:
        if self._session is None:
            raise self._progress.failure or closed_error()
        return self._session

    # -- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        interval = sys.getswitchinterval()
        sys.setswitchinterval(min(interval, _SWITCH_INTERVAL_S))
        try:
            session = self._open_session()
            with self._lock:
                self._session = session
            if self._closing.is_set():
                session.stop_reader()
            self._load(session)
            if sys.getswitchinterval() < interval:
                sys.setswitchinterval(interval)
            self._answer_rows(session)
        except Exception as error:  # noqa: BLE001 - border of a thread: reported to everyone who waits
            self._fail(failure_of(error, "uploader failed", "loader.uploader"))
        finally:
            if sys.getswitchinterval() < interval:
                sys.setswitchinterval(interval)

    def _load(self, session: DeviceSession) -> None:
        """Until every chunk is on the device or the stream was closed; ends at a safe point."""
        while not (self._intake.is_done and self._is_idle(session)):
            if self._wait_readable(session):
                data = session.link.read_records()
                if not data:
                    if self._closing.is_set():
                        break
                    raise self._intake.reader_gone()
                self._handle(session, data)
            self._return_slots(session)
            self._upload_waiting(session)
        if session.unpacker is not None and session.unpacker.unpacked_bytes:
            self._progress.mark("unpacked", session.unpacker.first_ns, size=session.unpacker.unpacked_bytes)
        session.settle()
        self._spare_events += [event for event, _ in self._in_flight]
        self._in_flight.clear()

    def _is_idle(self, session: DeviceSession) -> bool:
        is_unpacked = session.unpacker is None or session.unpacker.is_idle
        return is_unpacked and not (self._in_flight or self._waiting)

    def _wait_readable(self, session: DeviceSession) -> bool:
        poll = select.poll()
        poll.register(session.link.records_fd, select.POLLIN)
        ready = bool(poll.poll(self._patience.left_ms() if self._is_idle(session) else _POLL_MS))
        self._patience.check()
        return ready

    def _handle(self, session: DeviceSession, data: bytes) -> None:
        full: list[Record] = []
        others: list[Record] = []
        for record in iter_records(data):
            (full if record[0] == wire.FULL else others).append(record)
        self._waiting += full
        self._slots.filled(len(full))
        if not self._upload_waiting(session):
            if self._closing.is_set():
                session.stop_reader()
            return
        for record in others:
            if record[0] == wire.GREW:
                self._slots.reader_grew(record[4], session.ring.choice.slot_bytes)
            self._intake.handle(record)

    def _upload_waiting(self, session: DeviceSession) -> bool:
        """Until nothing waits or there is no place to unpack in. False: the ring was replaced, see `_upload`."""
        while batch := self._next_batch(session):
            if not self._upload(session, batch):
                self._waiting.clear()
                self._slots = self._make_slots()  # the new reader has them all
                return False
            if self._waiting:
                self._return_slots(session)
        return True

    def _next_batch(self, session: DeviceSession) -> list[Record]:
        """All that waits, or what can be unpacked of it; nothing while the stream is being closed."""
        batch: list[Record] = []
        unpacker = session.unpacker
        if self._closing.is_set():
            self._waiting.clear()
        room = unpacker.room() if unpacker else 0
        while self._waiting:
            if unpacker and unpacker.is_coded(self._waiting[0][1]):
                if not room:
                    break
                room -= 1
            batch.append(self._waiting.popleft())
        return batch

    def _upload(self, session: DeviceSession, records: list[Record]) -> bool:
        """Enqueue the copies. False: the ring was replaced, the new reader sends these chunks again."""
        reusable = session.pin([record[2] for record in records])
        if reusable is None:
            return False
        driver, stream, unpacker = session.driver, session.stream, session.unpacker
        complete: list[int] = []
        for record in records:
            chunk, slot = record[1], record[2]
            base = session.ring.address(slot)
            for piece in self._plan.chunks[chunk].pieces:
                target = session.arenas[piece.arena].pointer + piece.arena_offset
                driver.copy_async(target, base + piece.offset, piece.bytes, stream)
            if unpacker and unpacker.is_coded(chunk):
                unpacker.stage(chunk, record, base)
            else:
                complete += self._arrived(record)
        if unpacker:
            unpacker.launch()
        event = self._spare_events.pop() if self._spare_events else driver.event_create()
        self._in_flight.append((event, reusable))
        driver.event_record(event, stream)
        self._announce(driver, stream, complete)
        return True

    def _arrived(self, record: Record) -> list[int]:
        return self._progress.arrived(record[1], record[5], record[6], record[9] == wire.WHOLE)

    def _announce(self, driver: Driver, stream: int, groups: list[int]) -> None:
        for group in groups:
            event = driver.event_create()
            with self._lock:
                self._group_events[group] = event
            driver.event_record(event, stream)
        if groups:
            self._progress.mark_ready(groups)

    def _return_slots(self, session: DeviceSession) -> None:
        """Of copies that are complete; also announce groups whose last pieces are unpacked."""
        if session.unpacker is not None:
            records = session.unpacker.collect()
            self._announce(
                session.driver, session.stream, [g for record in records for g in self._arrived(record)]
            )
        while self._in_flight and session.driver.event_query(self._in_flight[0][0]):
            event, done = self._in_flight.popleft()
            self._spare_events.append(event)
            self._slots.put(done)
        slots = [] if self._intake.is_done else self._slots.take()
        if slots:
            session.link.give_slots(slots)

    def _answer_rows(self, session: DeviceSession) -> None:
        """After the load: the reader stays for row gathers until the stream is closed."""
        while not self._closing.is_set():
            data = session.link.read_records()
            if not data:
                if not self._closing.is_set():
                    self._rows.fail(self._intake.reader_gone())
                return
            for record in iter_records(data):
                self._intake.handle(record)

    def _fail(self, error: WorkerError) -> None:
        """Leave nothing behind but what a broken context may still use, then tell everyone."""
        with self._lock:
            session, self._session = self._session, None
            if session is not None:
                session.stop_reader(drain=True)
                session.settle(is_failed=True)
                self._release_events(session)
                session.close()
        self._progress.fail(error)
        self._rows.fail(error)

    def _release_events(self, session: DeviceSession | None = None) -> None:
        session = session or self._session
        events = [*self._group_events.values(), *self._spare_events, *(event for event, _ in self._in_flight)]
        self._group_events.clear()
        self._spare_events.clear()
        self._in_flight.clear()
        if session is not None and not session.is_broken:
            with InContext(session.driver, session.context):
                for event in events:
                    session.driver.event_destroy(event)
