"""What each verification level finds, and the background pass that finds the rest.

    edges   first and last KiB of every tensor, before its chunk is announced: wrong files, truncation, holes of unfinished
            downloads, shifted offsets. It does not find a flipped bit inside a tensor.
    full    SHA-256 of every 16 MiB block before its chunk is announced; about 1.4 GB/s per core.
    auto    edges, and full while storage is slower than half of what the cores can hash.

`start_rehash` hashes all blocks with the same reader program at the lowest priority, for after the first request. On a
mismatch a worker must take no more work: what it computed may be wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from loader import reader as wire
from loader.collector import Collector, Patience
from loader.errors import CapabilityError, WorkerError
from loader.intake import Intake
from loader.load_plan import LoadPlan, PlanGroup, Run, recut
from loader.plan_wire import ReadSettings, encode_plan
from loader.progress import LoadMark, LoadProgress
from loader.reader_link import begun, spawn_reader
from loader.row_gather import RowDesk

_NICE = 19


class Rehash:
    """A running background pass over the files of a plan."""

    def __init__(self, collector: Collector, progress: LoadProgress) -> None:
        self._collector = collector
        self._progress = progress

    @property
    def is_complete(self) -> bool:
        return self._progress.is_complete and self._progress.failure is None

    @property
    def failure(self) -> WorkerError | None:
        return self._progress.failure

    def wait(self) -> None:
        """Block until every block was hashed. Raises: ArtifactError: names file, range and tensors."""
        self._progress.wait_all()

    def marks(self) -> list[LoadMark]:
        return self._progress.marks()

    def close(self) -> None:
        self._collector.close()


def start_rehash(
    plan: LoadPlan,
    directory: Path,
    *,
    threads: int = 1,
    storage_gbps: float | None = None,
    on_failure: Callable[[WorkerError], None] | None = None,
) -> Rehash:
    """Hash every block of the files that `plan` reads, in a niced process with idle I/O priority.

    Args:
        on_failure: called once, on the collector's thread, with what went wrong.
    Raises: CapabilityError: no child process here, or files without digests; OSError never.
    """
    blocks = _block_plan(plan)
    settings = ReadSettings(
        mode=wire.HASH,
        threads=threads,
        verify=wire.WHOLE,
        slot_bytes=0,
        pool_bytes=0,
        cpus=threads,
        rate=(storage_gbps or 0.0) * 1e9,
    )
    wire_plan = encode_plan(blocks, directory, settings)
    progress = LoadProgress(blocks, on_failure)
    rows = RowDesk(wire_plan)
    intake = Intake(blocks._replace(tensors=plan.tensors, tables=plan.tables), wire_plan, progress, rows)
    try:
        link = begun(spawn_reader(nice=_NICE), lambda link: link.begin(wire_plan.data, 0))
    except OSError as error:
        raise CapabilityError(f"no background verification: {error}", where="verify") from error
    intake.use(link)
    rows.use(link)
    collector = Collector(link, [], intake, progress, rows, Patience(progress, blocks.total_bytes, None))
    collector.start()
    return Rehash(collector, progress)


def _block_plan(plan: LoadPlan) -> LoadPlan:
    """One chunk per digest block of every file in use; one group per file. Raises: CapabilityError: one has no digests."""
    used = sorted({chunk.file for chunk in plan.chunks} | {table.file for table in plan.tables.values()})
    without = [plan.files[index].path for index in used if not plan.files[index].digest_bytes]
    if without:
        raise CapabilityError(
            "files have no digests to compare with",
            where="verify",
            found=", ".join(without),
            hint="prepare the checkpoint: only manifests have digests",
        )
    runs, groups = [], []
    for index in used:
        file = plan.files[index]
        size = file.size - file.data_start
        runs.append(Run(index, file.data_start, size, 0, 0))
        groups.append(PlanGroup(file.path, "", (), ((index, file.data_start, file.size),), (), size))
    whole = max((plan.files[index].digest_bytes for index in used), default=wire._MAX_READ)
    return recut(
        LoadPlan(plan.files, (), tuple(runs), tuple(groups), (), {}, {}, whole, plan.rank),
        whole,
    )
