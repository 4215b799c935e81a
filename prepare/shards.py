"""Groups for several ranks: tensors that ranks hold in parts leave their group for one group per rank.

What is cut, and where, is the family's to say. Everything else stays where it is, stored once. With `--ranks 1` beside
other numbers, and for numbers of ranks that need a tensor whole which others cut, it goes to a group `whole`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace

from loader.errors import RequestError
from prepare.recipe import OutputGroup, OutputTensor, Rows
from runtime.parallel.prepared import WHOLE, shard_name, shard_prefix
from runtime.parallel.split import Cut

CutTensor = Callable[[str, int, int], Cut | None]
"""(tensor name, rank, number of ranks) -> part; None: that number of ranks needs it whole."""


def check_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Numbers of ranks, ascending, each once. Raises: RequestError."""
    if not sizes or min(sizes) < 1:
        raise RequestError("not a number of ranks", where="--ranks", found=list(sizes), expected="1 or more")
    return tuple(sorted(set(sizes)))


def shard_groups(
    groups: Sequence[OutputGroup], sizes: Sequence[int], cut: CutTensor
) -> tuple[OutputGroup, ...]:
    """Groups of a directory for these numbers of ranks; just 1: `groups` as they are. File order: shared, whole, ranks."""
    if tuple(sizes) == (1,):
        return tuple(groups)
    shared, whole, parts = [], [], []
    for group in groups:
        taken = [tensor for tensor in group.tensors if any(cut(tensor.name, 0, size) for size in sizes)]
        rest = tuple(tensor for tensor in group.tensors if tensor not in taken)
        if rest or not taken:
            shared.append(replace(group, tensors=rest))
        kept = [tensor for tensor in taken if any(cut(tensor.name, 0, size) is None for size in sizes)]
        if kept:
            whole.append(_moved(group, WHOLE, kept))
        for size in sizes:
            cuts = [tensor for tensor in taken if cut(tensor.name, 0, size)]
            if cuts:
                parts += [_part(group, cuts, rank, size, cut) for rank in range(size)]
    parts.sort(key=lambda group: _shard_key(group.shard))
    return (*shared, *whole, *parts)


def shard_orders(
    orders: Mapping[str, Sequence[str]], groups: Sequence[OutputGroup], sizes: Sequence[int], cut: CutTensor
) -> dict[str, tuple[str, ...]]:
    """Orders of every rank: `<order>` for one rank, `<order>/rank-<r>-of-<P>` for more. groups: of `shard_groups`."""
    if tuple(sizes) == (1,):
        return {name: tuple(order) for name, order in orders.items()}
    tensors = {group.name: [tensor.name for tensor in group.tensors] for group in groups}
    result: dict[str, tuple[str, ...]] = {}
    for name, order in orders.items():
        for size in sizes:
            unused = {group for group in tensors if group and _is_unused(group, tensors[group], size, cut)}
            for rank in range(size):
                key = name if size == 1 else f"{name}/{shard_name(rank, size)}"
                used = (_places(group, rank, size, tensors) for group in order)
                result[key] = tuple(place for places in used for place in places if place not in unused)
    return result


def _is_unused(group: str, tensors: Sequence[str], size: int, cut: CutTensor) -> bool:
    """Whether a group of whole tensors holds only what this number of ranks has in parts."""
    return group.split("/")[1] == WHOLE and all(cut(tensor, 0, size) for tensor in tensors)


def _places(group: str, rank: int, size: int, stored: Container[str | None]) -> list[str]:
    """Groups that hold the tensors of `group` for one rank. A group that nobody knows here (a table) is itself."""
    shards = (shard_prefix(group, shard) for shard in (WHOLE, shard_name(rank, size)))
    return [place for place in (group, *shards) if place in stored] or [group]


def _moved(group: OutputGroup, shard: str, tensors: Sequence[OutputTensor]) -> OutputGroup:
    assert group.name is not None, "tensors outside groups are not cut"
    return replace(group, name=shard_prefix(group.name, shard), tensors=tuple(tensors), shard=shard)


def _part(
    group: OutputGroup, tensors: Sequence[OutputTensor], rank: int, size: int, cut: CutTensor
) -> OutputGroup:
    parts = [(tensor, cut(tensor.name, rank, size)) for tensor in tensors]
    return _moved(group, shard_name(rank, size), [cut_tensor(tensor, part) for tensor, part in parts if part])


def cut_tensor(tensor: OutputTensor, part: Cut) -> OutputTensor:
    """The tensor with only its part's rows or columns."""
    rows, *rest = tensor.spec.shape
    if part.columns is not None:
        assert len(rest) == 1, "columns of a matrix"
        columns = (part.columns.start, part.columns.stop)
        parts = tuple(replace(piece, columns=columns) for piece in tensor.parts)
        shape: tuple[int, ...] = (rows, len(part.columns))
    else:
        assert part.rows is not None, "rows or columns"
        parts = tuple(piece for wanted in part.rows for piece in _rows_within(tensor.parts, wanted))
        shape = (sum(map(len, part.rows)), *rest)
    return replace(tensor, spec=replace(tensor.spec, shape=shape), parts=parts)


def _rows_within(parts: Sequence[Rows], wanted: range) -> Iterator[Rows]:
    """Pieces of `parts`, laid one after the other, that make up the rows `wanted`."""
    start = 0
    for part in parts:
        first = max(wanted.start - start, 0)
        last = min(wanted.stop - start, part.stop - part.start)
        if first < last:
            yield replace(part, start=part.start + first, stop=part.start + last)
        start += part.stop - part.start


def _shard_key(shard: str) -> tuple[int, int]:
    """`rank-<r>-of-<P>` -> (P, r)."""
    _, rank, _, size = shard.split("-")
    return int(size), int(rank)
