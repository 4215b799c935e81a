"""Wires a CUDA load: budget → reader at once, then the rung: an uploader process, or session and uploader in here."""

from __future__ import annotations

from pathlib import Path

from loader import budget
from loader import reader as wire
from loader.collector import Patience, Transport
from loader.cuda_library import cuda_library
from loader.device_session import DeviceSession
from loader.devices import device_ordinal
from loader.driver import CudaDriver
from loader.errors import CapabilityError
from loader.intake import Intake
from loader.ladder import open_device_reader, open_uploader
from loader.load_plan import LoadPlan, recut
from loader.options import StreamOptions
from loader.plan_wire import VERIFY_LEVELS, ReadSettings, encode_plan
from loader.progress import LoadProgress
from loader.reader_link import EmbeddedReader, ReaderLink, end_links, spawn_reader
from loader.remote_upload import RemoteUpload
from loader.row_gather import RowDesk
from loader.slots import SlotStack, slots_to_keep
from loader.stream import WeightStream
from loader.upload_wire import work_of
from loader.uploader import Uploader
from loader.uploader_link import UploaderProcess

_PARENTS_CPUS = 6  # the import, the token process, the uploader and its driver run beside the readers


def start_device(
    plan: LoadPlan,
    directory: Path,
    device: str,
    options: StreamOptions,
    reader: ReaderLink | None,
    uploader: UploaderProcess | None,
) -> WeightStream:
    """`loader.stream.start` for a CUDA device; the reader works before the context exists."""
    ordinal = device_ordinal(device)
    process, reason = None, ""
    try:  # before everything else: the context takes longest
        process, reason = open_uploader(options, ordinal, len(plan.arenas), reader, uploader)
    except OSError as error:
        reason = str(error)
    try:
        load = _DeviceLoad(plan, directory, ordinal, options, reader)
        transport = load.open_remote(process, reason) or load.open_local()
        transport.start()
    except BaseException:
        end_links(process)  # what was handed in is the caller's to end
        raise
    return WeightStream(load.plan, f"cuda:{ordinal}", transport, load.progress, load.rows)


class _DeviceLoad:
    """What every rung of one load shares."""

    def __init__(
        self,
        plan: LoadPlan,
        directory: Path,
        ordinal: int,
        options: StreamOptions,
        reader: ReaderLink | None,
    ) -> None:
        self._reader = reader  # until a rung takes it
        self.ordinal = ordinal
        self.options = options
        self.near = _near_cpus()
        cpus = budget.cpu_count()
        near = min(cpus.value, len(self.near) or cpus.value)
        threads = budget.reader_threads(budget.share_of(near, options.sharers), _PARENTS_CPUS)
        if options.threads:
            threads = budget.Choice(options.threads, "forced")
        headroom = budget.memory_headroom()
        self.choice = budget.choose_ring(
            threads.value, plan.chunk_bytes, plan.total_bytes, headroom.value, options.ring_bytes, options.slot_bytes
        )  # fmt: skip
        self.plan = recut(plan, self.choice.slot_bytes) if self.choice.slot_bytes < plan.chunk_bytes else plan
        self.progress = LoadProgress(self.plan)
        self.progress.mark(
            f"ring {self.choice.slots} x {self.choice.slot_bytes}: {self.choice.reason}",
            size=self.choice.bytes,
        )
        self.progress.mark(f"{threads.value} reader threads: {threads.reason}")
        settings = ReadSettings(
            mode=wire.RING,
            threads=threads.value,
            verify=VERIFY_LEVELS[options.verify],
            slot_bytes=self.choice.slot_bytes,
            pool_bytes=self.choice.bytes,
            cpus=cpus.value,
            most_threads=budget.most_threads(threads.value, options.threads, options.storage_gbps),
            part_bytes=options.part_bytes,
            rate=(options.storage_gbps or 0.0) * 1e9,
            fault=options.storage_fault,
        )
        self._filling = settings.filling_bytes
        self._wire_plan = encode_plan(self.plan, directory, settings)
        self.rows = RowDesk(self._wire_plan)
        self._intake = Intake(self.plan, self._wire_plan, self.progress, self.rows)
        self._patience = Patience(self.progress, self.plan.total_bytes, options.max_load_s)

    def _begin(self, link: ReaderLink) -> None:
        link.begin(self._wire_plan.data, self.choice.bytes, self.near)
        link.give_slots(range(self.choice.slots))

    def _adopt(self, link: ReaderLink) -> None:
        self._intake.use(link)
        self.rows.use(link)

    def open_remote(self, process: UploaderProcess | None, reason: str) -> Transport | None:
        """Path U, or None and a mark that says why not.

        Args:
            process: None = not possible for `reason`, if there is one.
        Raises: CapabilityError: it was forced and is not possible.
        """
        options, link = self.options, None
        if process is not None:
            try:
                link = self._begin_remote(process)
            except OSError as error:
                reason = str(error)
        if process is None or link is None:
            if options.path == "U":
                raise CapabilityError(reason, where="path U", hint="leave the path out to fall back")
            if reason:
                self.progress.mark(f"path U refused: {reason}")
            return None
        try:
            self.progress.mark(f"path U, {link.kind}: {reason}")
            self.progress.mark(f"uploader {process.pid} started")
            self._adopt(link)
            return self._remote(process, link)
        except BaseException:
            end_links(link)
            raise

    def _remote(self, process: UploaderProcess, link: ReaderLink) -> RemoteUpload:
        options, driver = self.options, self.options.driver
        return RemoteUpload(
            self.plan, process, link, lambda: driver or cuda_library(), self._intake, self.progress, self.rows,
            self._patience, None if options.path else self.open_local,
        )  # fmt: skip

    def _begin_remote(self, process: UploaderProcess) -> ReaderLink:
        """Start the reader, give the process its work. Raises: OSError: one is not possible; both are ended then."""
        link = None
        try:
            link = self._sharing_reader(process)
            self._begin(link)
            work = work_of(
                self.plan, self.choice.slots, self.choice.slot_bytes, self._keep(link.recycles), self.options.reserve_bytes,
                self.options.staging_slots, link.recycles,
            )  # fmt: skip
            process.begin(work.encode(), link.shared_fds())
            link.drop_pool()
            return link
        except BaseException as error:
            ending = process.stop()
            end_links(process, link)
            if isinstance(error, OSError):
                raise OSError(f"{error}; uploader process: {ending}") from error
            raise

    def _keep(self, recycles: bool) -> int:
        """Free slots that the reader should have at most; all of them where someone else decides that."""
        choice = self.choice
        return slots_to_keep(self._filling, choice.slot_bytes) if recycles else choice.slots

    def _sharing_reader(self, process: UploaderProcess) -> ReaderLink:
        """The one that was started early, or one inside the uploader's process."""
        reader, self._reader = self._reader, None
        if reader is not None and reader.can_share:
            return reader
        return spawn_reader() if self.options.reader == "child" else EmbeddedReader(process)

    def open_local(self) -> Transport:
        """Path A, or what remains below it."""
        options = self.options
        reader, self._reader = self._reader, None
        path, link, reason = open_device_reader(options, reader, self._begin)
        try:
            self.progress.mark(f"path {path}, {link.kind if link else 'threads'}: {reason}")
            if link is not None:
                self._adopt(link)
            return self._uploader(path, link)
        except BaseException:
            end_links(link)
            raise

    def _uploader(self, path: str, link: ReaderLink | None) -> Uploader:
        options, unpack = self.options, None
        if self.plan.codec is not None:
            from loader.codec.unpack_plan import unpack_plan_of

            unpack = unpack_plan_of(self.plan, self.choice.slot_bytes, options.staging_slots)

        def open_session() -> DeviceSession:
            return DeviceSession(
                self.plan, lambda: options.driver or CudaDriver(), self.ordinal, self.choice, link, self._begin,
                self._adopt, self.progress, path, options.path is None, options.reserve_bytes, unpack,
            )  # fmt: skip

        return Uploader(
            self.plan,
            self.ordinal,
            path,
            open_session,
            link,
            self._intake,
            self.progress,
            self.rows,
            self._patience,
            lambda: SlotStack(self.choice.slots, self._keep(link is None or link.recycles)),
        )


def _near_cpus() -> list[int]:
    """CPUs beside the GPU, where all GPUs of this container agree on them; empty = run anywhere."""
    nodes = {tuple(budget.near_cpus(address)) for address in budget.gpu_addresses()}
    return list(nodes.pop()) if len(nodes) == 1 else []
