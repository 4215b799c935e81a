"""Wires a CPU load: arenas that a reader fills, a process or, where one is refused, threads of this process."""

from __future__ import annotations

from pathlib import Path

from loader import budget
from loader import reader as wire
from loader.arena import HostArena
from loader.collector import Collector, Patience
from loader.errors import CapabilityError, InternalError
from loader.intake import Intake
from loader.ladder import open_host_reader
from loader.load_plan import LoadPlan
from loader.options import StreamOptions
from loader.plan_wire import VERIFY_LEVELS, ReadSettings, arena_bases, encode_plan
from loader.progress import LoadProgress
from loader.reader_link import ReaderLink, ThreadReader, end_links
from loader.row_gather import RowDesk
from loader.stream import WeightStream


def start_cpu(
    plan: LoadPlan, directory: Path, options: StreamOptions, reader: ReaderLink | None
) -> WeightStream:
    """`loader.stream.start` for the CPU."""
    if plan.codec is not None:
        raise CapabilityError(
            "weights are coded for a GPU, and a CPU cannot unpack them",
            where="codec",
            found=plan.codec.name,
            expected="none on a CPU",
            hint="prepare the checkpoint again with --codec none",
        )
    load = _CpuLoad(plan, directory, options)
    transport = load.open(reader)
    transport.start()
    return WeightStream(plan, "cpu", transport, load.progress, load.rows)


class _CpuLoad:
    """What both kinds of reader share."""

    def __init__(self, plan: LoadPlan, directory: Path, options: StreamOptions) -> None:
        self._plan = plan
        self._options = options
        self._bases = arena_bases(plan)
        self._wire_plan = encode_plan(plan, directory, _settings(options, self._bases[-1]))
        self.progress = LoadProgress(plan)
        self.rows = RowDesk(self._wire_plan)
        self._intake = Intake(plan, self._wire_plan, self.progress, self.rows)

    def open(self, reader: ReaderLink | None) -> Collector:
        """Raises: InternalError: no memory for a forced reader's arenas; CapabilityError: what was forced is not possible;
        OSError: not even threads of this process have what they need.
        """
        options = self._options
        link, reason = open_host_reader(options, reader)
        fall = self.fall if link.kind == "child" and options.reader is None else None
        try:
            arenas = self._begin(link, reason)
        except OSError as error:
            if fall is None:
                raise InternalError(
                    f"cannot make {self._bases[-1]} bytes of arenas: {error}", where="loader.stream"
                ) from error
            link, arenas = fall(str(error))
            fall = None
        patience = Patience(self.progress, self._plan.total_bytes, options.max_load_s)
        return Collector(link, arenas, self._intake, self.progress, self.rows, patience, fall)

    def fall(self, reason: str) -> tuple[ReaderLink, list[HostArena]]:
        """Threads of this process, with arenas of their own. Raises: OSError, RuntimeError: not even those."""
        link = ThreadReader()
        return link, self._begin(link, reason)

    def _begin(self, link: ReaderLink, reason: str) -> list[HostArena]:
        """Its arenas; it is at work then, or ended if there is an error."""
        try:
            link.begin(self._wire_plan.data, self._bases[-1])
            arenas = [
                HostArena(arena.name, link.map_pool(base, arena.bytes))
                for arena, base in zip(self._plan.arenas, self._bases, strict=False)
            ]
            link.drop_pool()
            self.progress.mark(f"path E, {link.kind}: {reason}")
            self._intake.use(link)
            self.rows.use(link)
            return arenas
        except BaseException:
            end_links(link)
            raise


def _settings(options: StreamOptions, pool_bytes: int) -> ReadSettings:
    cpus = budget.cpu_count()
    threads = options.threads or budget.reader_threads(budget.share_of(cpus.value, options.sharers)).value
    return ReadSettings(
        mode=wire.DIRECT,
        threads=threads,
        verify=VERIFY_LEVELS[options.verify],
        slot_bytes=0,
        pool_bytes=pool_bytes,
        cpus=cpus.value,
        most_threads=budget.most_threads(threads, options.threads, options.storage_gbps),
        part_bytes=options.part_bytes,
        rate=(options.storage_gbps or 0.0) * 1e9,
        fault=options.storage_fault,
    )
