"""A prepared directory of released size with random weights, written as fast as memory takes it.

The layout, names, digests and manifest are those that prepare writes for the published checkpoint; only the numbers
are random: matrices normal with deviation 0.02, norm weights one. 101 GB for t2va with base-49, so give it
memory-backed storage. Run: `python -m scripts.bench.full_size DIRECTORY [--task t2va] [--schedule base-49]`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from loader.manifest import CHUNK_BYTES, MANIFEST_NAME, encode_manifest
from prepare.codec import Coding
from prepare.codec_directory import CodecReport, encode_directory
from prepare.compile import compile_kernels
from prepare.digests import FileDigests, edge_digest
from prepare.families.minimax_h3.recipe import build_recipe, loading_order
from prepare.families.minimax_h3.source import MiniMaxH3Source
from prepare.families.minimax_h3.tables import plan_table
from prepare.family import PrepareOptions
from prepare.file_plan import PlacedTensor, PlannedFile, plan_weight_files
from prepare.kernel_files import flushed_files
from prepare.shards import check_sizes, shard_groups, shard_orders
from prepare.tokenizer import build_tokenizer
from prepare.writer import WrittenFiles, build_manifest
from runtime.families.minimax_h3.config import H3Config
from runtime.families.minimax_h3.shards import cut_of
from runtime.schedules import named_schedule
from scripts.bench.random_files import Piece, Pools, random_pools, tensor_pieces, write_at
from scripts.tiny_presets import TinyConfig, preset
from scripts.tiny_tokenizer import write_tokenizer

_SMALL_POOL_BYTES = 8 << 20


def write_full_size(
    directory: Path,
    tasks: Sequence[str] = ("t2va",),
    schedules: Sequence[str] = ("base-49",),
    size: str | TinyConfig = "full",
    architectures: Sequence[str] = (),
    ranks: Sequence[int] = (1,),
) -> str:
    """Write the directory (which must not exist); returns the SHA-256 of its manifest. ranks: as `prepare --ranks`."""
    config = preset(size) if isinstance(size, str) else size
    source = _source(config.model, config.num_base_tokens, tasks, schedules, ranks)
    plans = [
        *plan_weight_files(source.recipe.groups, source.family),
        *(table.file for table in source.tables),
    ]
    total = sum(plan.num_bytes for plan in plans)
    pools = random_pools() if total > 1 << 30 else random_pools(_SMALL_POOL_BYTES)
    for plan in plans:
        (directory / plan.path).parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        written = [(plan, *_write_file(directory / plan.path, plan, pools, pool)) for plan in plans]
        files = [
            (plan, _digests(plan, whole.result(), [c.result() for c in chunks], edges))
            for plan, whole, chunks, edges in written
        ]
    (directory / "tokenizer").mkdir()
    (directory / "tokenizer" / "tokenizer.json").write_bytes(source.tokenizer)
    tokenizer = FileDigests(len(source.tokenizer), hashlib.sha256(source.tokenizer).hexdigest(), (), {})
    kernels = compile_kernels(directory, source.kernel_sizes, architectures, jobs=4)
    written_files = WrittenFiles(
        files, tokenizer, "0" * 64, kernels=kernels, kernel_files=flushed_files(directory, kernels)
    )
    options = PrepareOptions(ranks=tuple(ranks), kernels=tuple(architectures))
    data = encode_manifest(build_manifest(source, options, {}, written_files))
    (directory / MANIFEST_NAME).write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def _source(
    model: H3Config, num_base: int, tasks: Sequence[str], schedules: Sequence[str], ranks: Sequence[int]
) -> MiniMaxH3Source:
    tables = [
        plan_table(
            named_schedule(name), task, model.transformer, "BF16", "canonical", has_keyframes=task == "fl2va"
        )
        for name in schedules
        for task in tasks
    ]
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), num_base)
        tokenizer, _ = build_tokenizer(Path(folder))
    orders = {
        f"{t.task}/{t.schedule.name}": loading_order(model, t.task, t.key, t.schedule.evaluations)
        for t in tables
    }
    recipe, cut = build_recipe(model, "diffusers", tasks, "BF16", "F16"), partial(cut_of, model)
    recipe = replace(recipe, groups=shard_groups(recipe.groups, ranks, cut))
    return MiniMaxH3Source(
        root=Path(), layout="diffusers", notes=(), tasks=tasks, sources={}, recipe=recipe, tables=tables,
        tokenizer=tokenizer, orders=shard_orders(orders, recipe.groups, ranks, cut),
        read_files=(), model=model,
    )  # fmt: skip


def _write_file(path: Path, plan: PlannedFile, pools: Pools, pool: ThreadPoolExecutor):  # type: ignore[no-untyped-def]
    """Fill one file in parallel; returns the future of its digest, those of its chunks, and the edges."""
    with path.open("wb") as file:
        file.write(plan.header)
        file.truncate(plan.num_bytes)
    descriptor = os.open(path, os.O_RDWR)
    pieces = [
        (piece, begin)
        for number, placed in enumerate(plan.tensors)
        if placed.output is not None
        for piece, begin in _pieces(placed, pools, number)
    ]
    start = len(plan.header)
    list(pool.map(lambda item: write_at(descriptor, item[0], start + item[1]), pieces))
    edges = {p.output.name: _edges(descriptor, start, p) for p in plan.tensors if p.output is not None}
    chunks = [
        pool.submit(_hash_range, path, start + begin, min(begin + CHUNK_BYTES, plan.data_bytes) + start)
        for begin in range(0, plan.data_bytes, CHUNK_BYTES)
    ]
    os.close(descriptor)
    return pool.submit(_hash_range, path, 0, plan.num_bytes), chunks, edges


def _pieces(placed: PlacedTensor, pools: Pools, number: int) -> Iterator[Piece]:
    assert placed.output is not None
    output = placed.output
    return tensor_pieces(
        output.name, output.spec.dtype, output.spec.shape, placed.begin, placed.end, pools, number
    )


def _edges(descriptor: int, start: int, placed: PlacedTensor) -> tuple[str, str]:
    size = min(1024, placed.end - placed.begin)
    head = os.pread(descriptor, size, start + placed.begin)
    tail = os.pread(descriptor, size, start + placed.end - size)
    return edge_digest(head), edge_digest(tail)


def _hash_range(path: Path, begin: int, end: int) -> str:
    digest, buffer = hashlib.sha256(), bytearray(4 << 20)
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        while begin < end:
            count = file.readinto(memoryview(buffer)[: min(len(buffer), end - begin)])
            digest.update(memoryview(buffer)[:count])
            begin += count
    return digest.hexdigest()


def _digests(
    plan: PlannedFile, whole: str, chunks: Sequence[str], edges: dict[str, tuple[str, str]]
) -> FileDigests:
    return FileDigests(plan.num_bytes, whole, tuple(chunks), edges)


def code_directory(plain: Path, target: Path) -> CodecReport:
    """Code a directory file by file; the plain one is gone afterwards, so that memory holds little more than one."""
    from prepare.codec_gpu import GpuEncoder

    report = encode_directory(plain, target, Coding(GpuEncoder()), consume=True, workers=2)
    shutil.rmtree(plain)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--task", action="append", default=[])
    parser.add_argument("--schedule", action="append", default=[])
    parser.add_argument("--preset", default="full")
    parser.add_argument(
        "--architecture", action="append", default=[], help="compile kernels for it; repeatable"
    )
    parser.add_argument(
        "--codec", choices=("none", "ans"), default="none", help="as prepare --codec; needs a GPU"
    )
    parser.add_argument("--ranks", type=int, action="append", default=[], help="as prepare --ranks")
    args = parser.parse_args()
    started = time.monotonic()
    tasks, schedules = args.task or ["t2va"], args.schedule or ["base-49"]
    ranks = check_sizes(args.ranks or [1])
    plain = (
        args.directory if args.codec == "none" else args.directory.with_name(args.directory.name + ".plain")
    )
    digest = write_full_size(plain, tasks, schedules, args.preset, args.architecture, ranks)
    if args.codec != "none":
        report = code_directory(plain, args.directory)
        digest = report.manifest_sha256
        print(f"bytes by component: {dict(report.plain)} plain, {dict(report.stored)} stored")
    print(f"{args.directory}: manifest {digest}, {time.monotonic() - started:.1f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
