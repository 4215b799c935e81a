"""One component of the published Diffusers layout at released size, with random weights, written in parallel.

Names, shapes, data types, shards, their index and config.json are those of the release: `transformer` has 66.3 GB,
`text_encoder` 66.7 GB (the language head and the layers that MiniMax-H3 never uses included). Give it memory-backed
storage. Run: `python -m scripts.bench.published_size DIRECTORY text_encoder`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path

from loader.header import DTYPE_BYTES
from prepare.families.minimax_h3.published import TEXT_ENCODER, TRANSFORMER, published_tensors
from prepare.recipe import TensorSpec
from scripts.bench.random_files import Piece, Pools, random_pools, tensor_pieces, write_at
from scripts.tiny_configs import write_configs
from scripts.tiny_presets import TinyConfig, preset

STEMS = {TRANSFORMER: "diffusion_pytorch_model", TEXT_ENCODER: "model"}
_SMALL_POOL_BYTES = 8 << 20

Tensors = Mapping[str, TensorSpec]


def write_component(
    directory: Path,
    component: str,
    config: TinyConfig,
    holes: Collection[str] = (),
    deadline: float = math.inf,
) -> int:
    """Write `directory/<component>/` and the configuration files of the whole tree.

    Args:
        component: a key of `STEMS`.
        config: sizes; `preset("full")` for the release's.
        holes: tensors that are left as holes in their files: they read as zeros and take no storage.
        deadline: when to give up, by `time.monotonic`.
    Returns: bytes of its tensors.
    Raises: TimeoutError: it took longer.
    """
    tensors = published_tensors(config.model)[component]
    folder = directory / component
    folder.mkdir(parents=True, exist_ok=True)
    write_configs(directory, config.model, "diffusers")
    shards = _cut(tensors, config.shard_bytes)
    names = [
        f"{STEMS[component]}-{number:05d}-of-{len(shards):05d}.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    total = sum(spec.num_bytes for spec in tensors.values())
    pools = random_pools() if total > 1 << 30 else random_pools(_SMALL_POOL_BYTES)
    files = [(folder / name, shard) for name, shard in zip(names, shards, strict=True)]
    _write_shards(files, pools, holes, deadline)
    weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / f"{STEMS[component]}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return total


def _cut(tensors: Tensors, shard_bytes: int) -> list[dict[str, TensorSpec]]:
    """Shards in order of use, each at most `shard_bytes` unless a single tensor is larger."""
    shards: list[dict[str, TensorSpec]] = [{}]
    size = 0
    for name, spec in tensors.items():
        if shards[-1] and size + spec.num_bytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = spec
        size += spec.num_bytes
    return shards


def _write_shards(
    shards: Sequence[tuple[Path, Tensors]], pools: Pools, holes: Collection[str], deadline: float
) -> None:
    descriptors: list[int] = []
    work: list[list[tuple[int, Piece]]] = []
    for path, tensors in shards:
        header, pieces = _lay_out(tensors, pools, holes)
        descriptors.append(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644))
        write_at(descriptors[-1], memoryview(header), 0)
        os.ftruncate(descriptors[-1], len(header) + sum(spec.num_bytes for spec in tensors.values()))
        work.append([(descriptors[-1], (data, len(header) + begin)) for data, begin in pieces])

    def write(item: tuple[int, Piece]) -> None:
        if time.monotonic() > deadline:
            raise TimeoutError("out of time while writing random weights")
        write_at(item[0], *item[1])

    try:
        # Files in turn: the kernel lets one thread at a time write to a file.
        turns = [item for turn in zip_longest(*work) for item in turn if item is not None]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(write, turns))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _lay_out(tensors: Tensors, pools: Pools, holes: Collection[str]) -> tuple[bytes, list[Piece]]:
    """Header (length included) and contents as the reference writer orders them: widest types first, no fillers."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    pieces: list[Piece] = []
    begin = 0
    ordered = sorted(tensors.items(), key=lambda item: -DTYPE_BYTES[item[1].dtype])
    for number, (name, spec) in enumerate(ordered):
        end = begin + spec.num_bytes
        header[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [begin, end]}
        if name not in holes:
            pieces += tensor_pieces(name, spec.dtype, spec.shape, begin, end, pools, number)
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text, pieces


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("component", choices=sorted(STEMS))
    parser.add_argument("--preset", default="full")
    args = parser.parse_args()
    started = time.monotonic()
    size = write_component(args.directory, args.component, preset(args.preset))
    seconds = time.monotonic() - started
    print(f"{args.directory / args.component}: {size / 1e9:.2f} GB, {seconds:.1f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
