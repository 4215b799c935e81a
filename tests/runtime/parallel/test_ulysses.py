"""Exchanges by themselves: bytes on the wire, poison in padding, a fourth part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.parallel.rows import gather_rows
from runtime.parallel.split import RowShards
from runtime.parallel.sums import sum_in_rank_order
from runtime.parallel.ulysses import GatheredHidden, ProjectedHeads
from tests.runtime.parallel.thread_ranks import on_threads

HEADS, WIDTH, HIDDEN = 8, 4, 6
Team = Callable[[int, Callable[..., Any]], list[Any]]


def run_exchange(
    size: int, num_rows: int, scheme: str, parts: int, chunk_rows: int = 3, team: Team = on_threads
):
    """Integer-valued products, exact in float32: (parts of all heads, rows, received bytes) as gathered from ranks."""
    generator = torch.Generator().manual_seed(size * 100 + num_rows)
    x = torch.randint(-3, 4, (num_rows, HIDDEN), generator=generator).float()
    matrices = torch.randint(-3, 4, (parts, HEADS, WIDTH, HIDDEN), generator=generator).float()
    shards = RowShards.of(num_rows, size)

    def run(ranks, control):
        own, held = shards.ranges[ranks.rank], HEADS // size
        heads = slice(ranks.rank * held, (ranks.rank + 1) * held) if scheme == "gathered" else slice(None)

        def project(hidden: Tensor, rows: range) -> Iterator[Tensor]:
            assert torch.equal(hidden, x[rows.start : rows.stop]), "other rows than those named"
            for matrix in matrices:
                yield torch.einsum("nd,hkd->nhk", hidden, matrix[heads])

        exchange = (
            GatheredHidden(ranks, shards, chunk_rows, chunk_rows)
            if scheme == "gathered"
            else ProjectedHeads(ranks, shards, chunk_rows)
        )
        arrived = [part.get() for part in exchange.attention_inputs(x[own.start : own.stop], project)]
        inward = ranks.received_bytes
        back = torch.empty(len(own), HEADS * WIDTH)
        for place, rows in exchange.return_rows(arrived[0]):
            back[place] = rows
        return arrived, back, inward, ranks.received_bytes - inward

    results = team(size, run)
    expected = torch.einsum("nd,phkd->pnhk", x, matrices)
    for index in range(parts):
        assert torch.equal(torch.cat([r[0][index] for r in results], dim=1), expected[index])
    assert torch.equal(torch.cat([r[1] for r in results]), expected[0].flatten(1))
    return [(r[2], r[3]) for r in results]


@pytest.mark.parametrize("num_rows", [16, 17, 23, 3, 1])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("scheme", ["gathered", "exchanged"])
def test_parts_and_rows_are_exact(scheme: str, size: int, num_rows: int) -> None:
    torch.use_deterministic_algorithms(True)  # unwritten memory holds NaN
    try:
        run_exchange(size, num_rows, scheme, parts=4)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("parts", [3, 4])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_received_bytes_follow_the_formula(size: int, parts: int) -> None:
    rows = 24
    foreign = rows - rows // size
    back = foreign // (size - 1) * (size - 1) * HEADS // size * WIDTH * 4
    assert run_exchange(size, rows, "gathered", parts) == [(foreign * HIDDEN * 4, back)] * size
    inward = foreign * parts * HEADS // size * WIDTH * 4
    assert run_exchange(size, rows, "exchanged", parts) == [(inward, back)] * size


@pytest.mark.parametrize("counts", [(2, 2), (3, 0, 1), (0, 0, 0, 5)])
def test_rows_are_gathered_in_order(counts: tuple[int, ...]) -> None:
    rows = torch.arange(2.0 * sum(counts)).view(-1, 2)
    own = rows.split(list(counts))
    for gathered in on_threads(len(counts), lambda ranks, _: gather_rows(ranks, own[ranks.rank], counts)):
        assert torch.equal(gathered, rows)


def test_sums_do_not_depend_on_who_asks() -> None:
    shares = torch.randn(4, 33, generator=torch.Generator().manual_seed(0)).bfloat16()
    sums = on_threads(4, lambda ranks, _: sum_in_rank_order(ranks, shares[ranks.rank]))
    expected = (((shares[0].float() + shares[1].float()) + shares[2].float()) + shares[3].float()).bfloat16()
    assert all(torch.equal(total, expected) for total in sums)
