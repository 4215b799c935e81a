"""What a step is made of: operations and bytes by formula, rates by measurement, time by kernel from a profile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from runtime.families.minimax_h3.config import TransformerConfig
from runtime.families.minimax_h3.products import block_products
from runtime.ops.attention import Attention

PRODUCTS = ("to_qkv", "to_out", "ff_in", "ff_out")
LIBRARIES = ("default", "cublas", "cublaslt")
_FUSED = ("norm_modulate", "gate_residual", "qk_norm_rope", "swiglu", "rms_norm")
# Parts of kernel names (on the CPU: of operators), first match counts.
_KINDS = {
    "attention": ("sdpa", "fmha", "flash", "scaled_dot_product"),
    "fused": _FUSED,
    "products": ("gemm", "nvjet", "cutlass", "xmma", "mm", "linear", "splitk"),
    "copies": ("memcpy", "memset", "copy", "catarray", "clone"),
}


def block_operations(config: TransformerConfig, rows: int) -> dict[str, float]:
    """Operations of each product and of attention in one block; a multiply-add is two."""
    shapes = zip(PRODUCTS, block_products(config), strict=True)
    result = {name: 2.0 * rows * width * inner for name, (width, inner) in shapes}
    return result | {"attention": 4.0 * rows**2 * config.num_attention_heads * config.attention_head_dim}


def block_bytes(config: TransformerConfig, rows: int, itemsize: int) -> float:
    """Least bytes that the operators between products and attention read and write in one block.

    Twice gate_norm_modulate (four widths), q and k in place, two feed-forward halves in and one out.
    """
    A = config.num_attention_heads * config.attention_head_dim
    return float(rows * itemsize * (2 * 4 * config.hidden_size + 4 * A + 3 * config.ffn_dim))


def sustained_s(call: Callable[[], Any], device: str, at_least_s: float) -> float:
    """Seconds of one call, back to back for `at_least_s` after a quarter of that: the clocks are those of a long run."""
    call()
    synchronize(device)
    begun = time.perf_counter()
    call()
    synchronize(device)
    one = max(time.perf_counter() - begun, 1e-6)
    for count in (max(1, int(at_least_s / 4 / one)), max(2, int(at_least_s / one))):
        begun = time.perf_counter()
        for _ in range(count):
            call()
        synchronize(device)
        seconds = (time.perf_counter() - begun) / count
    return seconds


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def product_seconds(
    config: TransformerConfig, rows: int, device: str, dtype: torch.dtype, at_least_s: float
) -> dict[str, dict[str, float]]:
    """Library -> product -> seconds of one call, on normal values of the size that a network has."""
    libraries = LIBRARIES if device == "cuda" else LIBRARIES[:1]
    result: dict[str, dict[str, float]] = {library: {} for library in libraries}
    for name, (width, inner) in zip(PRODUCTS, block_products(config), strict=True):
        weight = torch.empty(width, inner, dtype=dtype, device=device).normal_(0, 0.02)
        x = torch.empty(rows, inner, dtype=dtype, device=device).normal_()
        for library in libraries:
            with blas_library(library, device):
                result[library][name] = sustained_s(lambda: linear(x, weight), device, at_least_s)  # noqa: B023
    return result


@contextmanager
def blas_library(name: str, device: str) -> Iterator[None]:
    """Prefer one library for products while active; `default`, and any on the CPU, change nothing."""
    if device != "cuda" or name == "default":
        yield
        return
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(name)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def attention_operands(
    config: TransformerConfig, rows: int, device: str, dtype: torch.dtype, layout: str
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [S, H, K]: `interleaved`, views of one projection as in the block; `apart`, each dense, rows outermost;
    `by_head`, each dense, heads outermost."""
    heads, width = config.num_attention_heads, config.attention_head_dim
    q, k, v = torch.empty(rows, 3, heads, width, dtype=dtype, device=device).normal_().unbind(1)
    if layout == "apart":
        return q.contiguous(), k.contiguous(), v.contiguous()
    if layout == "by_head":
        return tuple(x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v))  # type: ignore[return-value]
    return q, k, v


def attention_seconds(
    attention: Attention,
    config: TransformerConfig,
    rows: int,
    device: str,
    dtype: torch.dtype,
    at_least_s: float,
    layouts: Iterable[str] = ("interleaved", "apart", "by_head"),
) -> dict[str, float]:
    """Layout of the operands -> seconds of one call."""
    result = {}
    for layout in layouts:
        q, k, v = attention_operands(config, rows, device, dtype, layout)
        result[layout] = sustained_s(lambda: attention(q, k, v), device, at_least_s)  # noqa: B023
    return result


def copy_bytes_per_s(device: str, size: int, at_least_s: float) -> float:
    """Bytes read plus written per second by an elementwise kernel over `size` bytes."""
    source = torch.ones(size // 4, device=device)  # float32: 16 bytes a thread
    target = torch.empty_like(source)
    return 2 * size / sustained_s(lambda: torch.neg(source, out=target), device, at_least_s)


def profile(step: Callable[[], Any], device: str) -> dict[str, Any]:
    """Microseconds by kind and the longest kernels of one step; of operators on the CPU."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with record(activities=activities[: 2 if device == "cuda" else 1]) as recorded:
        step()
        synchronize(device)
    wanted = torch.autograd.DeviceType.CUDA if device == "cuda" else torch.autograd.DeviceType.CPU
    events = [e for e in recorded.events() if e.device_type == wanted]  # type: ignore[union-attr]
    own = (lambda e: e.time_range.elapsed_us()) if device == "cuda" else (lambda e: e.self_cpu_time_total)
    return summarise((str(e.name), float(own(e))) for e in events)


def summarise(events: Iterable[tuple[str, float]]) -> dict[str, Any]:
    """(name, microseconds) of every kernel -> sums by kind, and by name those that are neither products nor attention."""
    by_kind = dict.fromkeys((*_KINDS, "other"), 0.0)
    by_name: dict[str, list[float]] = {}
    for name, microseconds in events:
        by_kind[kind_of(name)] += microseconds
        by_name.setdefault(name, []).append(microseconds)
    total = sum(by_kind.values())
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:24]
    return {
        "microseconds": {kind: round(value, 1) for kind, value in by_kind.items()},
        "shares": {kind: round(value / total, 4) for kind, value in by_kind.items()} if total else {},
        "kernels": [
            {"name": name[:120], "kind": kind_of(name), "calls": len(times), "us": round(sum(times), 1)}
            for name, times in longest
        ],
    }


def kind_of(kernel: str) -> str:
    lowered = kernel.lower()
    return next((kind for kind, parts in _KINDS.items() if any(part in lowered for part in parts)), "other")
