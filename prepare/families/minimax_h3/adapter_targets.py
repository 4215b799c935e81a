"""Tensors of the MiniMax-H3 transformer that adapters may name, whatever layout adapter and checkpoint have.

An adapter may use Diffusers names, the fused `attn.to_qkv` (q, k, v one after the other), or native names, whose q, k, v
are interleaved per head and whose gated matrix is [gate; up].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prepare.adapters import Target
from prepare.families.minimax_h3.native import native_rows
from prepare.families.minimax_h3.published import TRANSFORMER
from prepare.families.minimax_h3.tree import NATIVE
from prepare.merge import Span
from prepare.recipe import Rows, TensorSpec
from runtime.families.minimax_h3.config import H3Config

GATE = ".attn.to_gate_compress.weight"
_QKV = tuple(f".attn.to_{part}.weight" for part in "qkv")

Places = tuple[tuple[str, Span], ...]


def adapter_targets(config: H3Config, layout: str, tensors: Mapping[str, TensorSpec]) -> dict[str, Target]:
    """Name in any spelling -> target.

    Args:
        layout: of the checkpoint. tensors: the transformer's published tensors by Diffusers name.
    """
    targets: dict[str, Target] = {}
    for name, spec in tensors.items():
        native = native_rows(TRANSFORMER, name, spec, config)
        own = native if layout == NATIVE else (Rows(TRANSFORMER, name, 0, spec.shape[0]),)
        targets[name] = Target(spec.shape, tuple(_in_order(own)))
    for name in [name for name in tensors if name.endswith(_QKV[0])]:
        targets[name.replace(_QKV[0], ".attn.to_qkv.weight")] = _fused(name, targets)
    for name, target in _native_targets(config, layout, tensors).items():
        targets.setdefault(name, target)
    return targets


def gates(tensors: Mapping[str, TensorSpec]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every gate of the compressed branch."""
    return {name: spec.shape for name, spec in tensors.items() if name.endswith(GATE)}


def _in_order(rows: tuple[Rows, ...], start: int = 0) -> Iterator[tuple[str, Span]]:
    """The adapter's rows are `rows`, one after the other."""
    for part in rows:
        yield part.tensor, Span(part.start, part.stop, start)
        start += part.stop - part.start


def _fused(query: str, targets: Mapping[str, Target]) -> Target:
    places: list[tuple[str, Span]] = []
    height = 0
    for part in _QKV:
        target = targets[query.replace(_QKV[0], part)]
        places += [
            (tensor, Span(span.start, span.stop, span.source + height)) for tensor, span in target.places
        ]
        height += target.shape[0]
    return Target((height, *targets[query].shape[1:]), tuple(places))


def _native_targets(config: H3Config, layout: str, tensors: Mapping[str, TensorSpec]) -> dict[str, Target]:
    places: dict[str, list[tuple[str, Span]]] = {}
    heights: dict[str, int] = {}
    logical: dict[str, str] = {}
    for name, spec in tensors.items():
        row = 0
        for part in native_rows(TRANSFORMER, name, spec, config):
            count = part.stop - part.start
            place = (part.tensor, part.start) if layout == NATIVE else (name, row)
            span = Span(place[1], place[1] + count, part.start)
            places.setdefault(part.tensor, []).append((place[0], span))
            heights[part.tensor] = max(heights.get(part.tensor, 0), part.stop)
            logical[part.tensor] = name
            row += count
    return {
        native: Target((heights[native], *tensors[name].shape[1:]), tuple(places[native]))
        for native, name in logical.items()
    }
