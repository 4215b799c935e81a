"""Wires a CUDA load: budget → reader at once, session and uploader behind it."""

from __future__ import annotations

from pathlib import Path

from loader import budget
from loader import reader as wire
from loader.collector import Patience
from loader.device_session import DeviceSession
from loader.driver import CudaDriver
from loader.intake import Intake
from loader.ladder import open_device_reader
from loader.load_plan import LoadPlan, recut
from loader.options import StreamOptions, device_ordinal
from loader.plan_wire import VERIFY_LEVELS, ReadSettings, encode_plan
from loader.progress import LoadProgress
from loader.reader_link import ReaderLink
from loader.row_gather import RowDesk
from loader.stream import WeightStream
from loader.uploader import Uploader


def start_device(
    plan: LoadPlan, directory: Path, device: str, options: StreamOptions, reader: ReaderLink | None
) -> WeightStream:
    """`loader.stream.start` for a CUDA device; the reader works before the context exists."""
    ordinal = device_ordinal(device)
    near = _near_cpus()
    cpus = budget.cpu_count()
    threads = options.threads or budget.reader_threads(min(cpus.value, len(near) or cpus.value)).value
    headroom = budget.memory_headroom()
    choice = budget.choose_ring(
        threads, plan.chunk_bytes, plan.total_bytes, headroom.value, options.ring_bytes, options.slot_bytes
    )
    if choice.slot_bytes < plan.chunk_bytes:
        plan = recut(plan, choice.slot_bytes)
    progress = LoadProgress(plan)
    progress.mark(
        f"ring {choice.slots} x {choice.slot_bytes}: {choice.reason}; {threads} threads", size=choice.bytes
    )
    settings = ReadSettings(
        mode=wire.RING,
        threads=threads,
        verify=VERIFY_LEVELS[options.verify],
        slot_bytes=choice.slot_bytes,
        pool_bytes=choice.bytes,
        cpus=cpus.value,
        most_threads=budget.most_threads(threads, options.threads, options.storage_gbps),
        rate=(options.storage_gbps or 0.0) * 1e9,
        fault=options.storage_fault,
    )
    wire_plan = encode_plan(plan, directory, settings)
    rows = RowDesk(wire_plan)
    intake = Intake(plan, wire_plan, progress, rows)

    def begin(link: ReaderLink) -> None:
        link.begin(wire_plan.data, choice.bytes, near)
        link.give_slots(range(choice.slots))

    def adopt(link: ReaderLink) -> None:
        intake.use(link)
        rows.use(link)

    path, link, reason = open_device_reader(options, reader, begin)
    progress.mark(f"path {path}, {link.kind if link else 'threads'}: {reason}")
    if link is not None:
        adopt(link)

    def open_session() -> DeviceSession:
        return DeviceSession(
            plan, lambda: options.driver or CudaDriver(), ordinal, choice, link, begin, adopt, progress, path,
            options.path is None, options.reserve_bytes,
        )  # fmt: skip

    patience = Patience(progress, plan.total_bytes, options.max_load_s)
    uploader = Uploader(plan, ordinal, path, open_session, intake, progress, rows, patience)
    uploader.start()
    return WeightStream(plan, f"cuda:{ordinal}", uploader, progress, rows)


def _near_cpus() -> list[int]:
    """CPUs beside the GPU, where all GPUs of this container agree on them; empty = run anywhere."""
    nodes = {tuple(budget.near_cpus(address)) for address in budget.gpu_addresses()}
    return list(nodes.pop()) if len(nodes) == 1 else []
