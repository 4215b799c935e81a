"""How many bytes coding leaves: by component, by type, against planes of exponents and mantissas."""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from loader.codec.pieces import PIECE_BYTES
from loader.header import tensor_bytes
from prepare.codec import MAX_RATIO, MIN_BYTES
from prepare.codec_gpu import GpuEncoder
from prepare.families.minimax_h3.recipe import build_recipe
from scripts.bench.common import target
from scripts.tiny_presets import preset

SAMPLE_BYTES = 64 << 20
TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
# Published for DFloat11 (Huffman codes of the exponents, decoded by the matrix products' side): coded over bf16 bytes.
DFLOAT11 = {"Llama 3.1 8B": 0.678, "Qwen 3 14B": 0.682, "FLUX.1 dev": 0.686, "SD 3.5 Large": 0.695}


def measure_ratios(trained: list[Path], targets: dict[str, Any]) -> dict[str, Any]:
    encoder = GpuEncoder()
    components = _components(encoder)
    sizes = {name: item["plain_bytes"] for name, item in components.items()}
    coded = sum(sizes[name] * components[name]["ratio"] for name in ("transformer", "text_encoder"))
    ratio = coded / sum(sizes[name] for name in ("transformer", "text_encoder"))
    targets["compressed_bytes_ratio"] = target(round(ratio, 4), 0.68, "lower")
    return {
        "library": f"{encoder.library} {encoder.version}",
        "piece_bytes": PIECE_BYTES,
        "components": components,
        "planes_normal_bf16": _planes(encoder, _normal(torch.bfloat16, SAMPLE_BYTES // 2)),
        "trained": {path.name: _trained(encoder, path) for path in trained},
        "eight_and_four_bits": _small_types(encoder),
        "dfloat11_published": DFLOAT11,
    }


def _normal(dtype: torch.dtype, count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(count, device="cuda", generator=generator) * 0.02).to(dtype)


def _bytes(tensor: torch.Tensor) -> bytearray:
    return bytearray(tensor.contiguous().view(torch.uint8).flatten().cpu().numpy())


def _coded_bytes(encoder: GpuEncoder, data: bytearray, dtype: str) -> int:
    """Bytes of the pieces. Every piece is decoded and compared on the way."""
    step = 256 * PIECE_BYTES
    parts = (memoryview(data)[start : start + step] for start in range(0, len(data), step))
    return sum(
        len(piece) for part in parts for piece in encoder.encode(bytearray(part), dtype, PIECE_BYTES)[0]
    )


def _components(encoder: GpuEncoder) -> dict[str, Any]:
    """Random weights at the released model's shapes; one tensor for each type and shape stands for all of them."""
    recipe = build_recipe(preset("full").model, "diffusers", ("t2va",), "BF16", "F16")
    shapes: dict[str, Counter[tuple[str, tuple[int, ...], bool]]] = {}
    for group in recipe.groups:
        for tensor in group.tensors:
            is_streamed = group.name is not None
            shapes.setdefault(group.component, Counter())[
                tensor.spec.dtype, tensor.spec.shape, is_streamed
            ] += 1
    ratios: dict[tuple[str, tuple[int, ...]], float] = {}
    result = {}
    for component, counts in shapes.items():
        plain = stored = 0.0
        for (dtype, shape, is_streamed), count in counts.items():
            size = tensor_bytes(dtype, shape)
            ratio = 1.0
            if is_streamed and size >= MIN_BYTES and dtype in TYPES:
                key = dtype, shape
                if key not in ratios:
                    sample = _normal(
                        TYPES[dtype], min(size, SAMPLE_BYTES) // TYPES[dtype].itemsize, len(ratios)
                    )
                    data = _bytes(sample)
                    ratios[key] = _coded_bytes(encoder, data, dtype) / len(data)
                ratio = ratios[key] if ratios[key] <= MAX_RATIO else 1.0
            plain, stored = plain + size * count, stored + size * count * ratio
        result[component] = {"plain_bytes": int(plain), "ratio": round(stored / plain, 4)}
    return result


def _planes(encoder: GpuEncoder, values: torch.Tensor) -> dict[str, float]:
    """One code for both bytes, against codes of the exponent plane with the rest raw, or coded too; and entropies."""
    words = values.view(torch.int16).to(torch.int32) & 0xFFFF
    exponent = ((words >> 7) & 0xFF).to(torch.uint8)
    rest = (((words >> 8) & 0x80) | (words & 0x7F)).to(torch.uint8)
    count = values.numel()
    coded_exponent = _coded_bytes(encoder, _bytes(exponent), "U8")
    coded_rest = _coded_bytes(encoder, _bytes(rest), "U8")
    return {
        "whole": round(_coded_bytes(encoder, _bytes(values), "BF16") / (2 * count), 4),
        "exponent_plane_coded_rest_raw": round((coded_exponent + count) / (2 * count), 4),
        "both_planes_coded": round((coded_exponent + coded_rest) / (2 * count), 4),
        "exponent_plane_alone": round(coded_exponent / count, 4),
        "entropy_of_exponent_bits": round(_entropy(exponent), 4),
        "least_by_exponent_entropy": round((8 + _entropy(exponent)) / 16, 4),
    }


def _entropy(plane: torch.Tensor) -> float:
    counts = torch.bincount(plane.to(torch.int64).flatten(), minlength=256).double()
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * shares.log2()).sum())


def _trained(encoder: GpuEncoder, path: Path) -> dict[str, Any]:
    """A safetensors file's matrices as bf16, cast where they are stored as another type, and as they are stored."""
    matrices = read_matrices(path)
    values = torch.cat([tensor.float().to(torch.bfloat16) for tensor in matrices.values()]).cuda()
    kind = "as stored" if set(matrices) == {"BF16"} else "trained, cast to bf16 here"
    stored = {
        dtype: round(_coded_bytes(encoder, data, dtype) / len(data), 4)
        for dtype, tensor in matrices.items()
        if (data := _bytes(tensor))
    }
    sizes = {dtype: tensor.numel() for dtype, tensor in matrices.items()}
    return {
        "values": values.numel(),
        "stored_as": sizes,
        "kind": kind,
        **_planes(encoder, values),
        "as_stored": stored,
    }


def read_matrices(path: Path) -> dict[str, torch.Tensor]:
    """Type -> values of all tensors of it with at least 8192, of a safetensors file, also inside a wheel; on the CPU."""
    data = path.read_bytes() if path.suffix == ".safetensors" else _inside_wheel(path)
    length = int.from_bytes(data[:8], "little")
    table: dict[str, Any] = json.loads(data[8 : 8 + length])
    parts: dict[str, list[torch.Tensor]] = {}
    for name, entry in table.items():
        if name == "__metadata__" or entry["dtype"] not in TYPES or math.prod(entry["shape"]) < 8192:
            continue
        begin, end = (8 + length + place for place in entry["data_offsets"])
        tensor = torch.frombuffer(bytearray(data[begin:end]), dtype=TYPES[entry["dtype"]])
        parts.setdefault(entry["dtype"], []).append(tensor)
    return {dtype: torch.cat(tensors) for dtype, tensors in parts.items()}


def _inside_wheel(path: Path) -> bytes:
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as wheel:
        names = [info for info in wheel.infolist() if info.filename.endswith(".safetensors")]
        return wheel.read(max(names, key=lambda info: info.file_size))


def _small_types(encoder: GpuEncoder) -> dict[str, Any]:
    """FP8 and NVFP4 payloads of normal weights, and their scales: whether coding pays (ratio at most 0.9)."""
    values = torch.randn(16 << 20, device="cuda", generator=torch.Generator("cuda").manual_seed(3))
    fp8 = (values / values.abs().max() * 448).to(torch.float8_e4m3fn)
    rows = values.view(-1, 16)
    scales = (rows.abs().amax(1) / 6).to(torch.float8_e4m3fn)
    codes = _e2m1(rows / scales.float()[:, None])
    packed = (codes.view(-1, 2)[:, 0] | (codes.view(-1, 2)[:, 1] << 4)).to(torch.uint8)
    found = {
        "fp8_e4m3_as_fp8": (fp8, "F8_E4M3"),
        "fp8_e4m3_as_bytes": (fp8, "U8"),
        "nvfp4_payload": (packed, "U8"),
        "nvfp4_scales": (scales, "F8_E4M3"),
    }
    result: dict[str, Any] = {}
    for name, (tensor, dtype) in found.items():
        data = _bytes(tensor)
        ratio = _coded_bytes(encoder, data, dtype) / len(data)
        result[name] = {"ratio": round(ratio, 4), "pays": ratio <= MAX_RATIO}
    return result


def _e2m1(values: torch.Tensor) -> torch.Tensor:
    """Codes 0 … 15 of the nearest of ±{0, 0.5, 1, 1.5, 2, 3, 4, 6}."""
    steps = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=values.device)
    return (torch.bucketize(values.abs(), steps) | ((values < 0).to(torch.int64) << 3)).flatten()
