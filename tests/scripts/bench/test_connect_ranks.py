"""What the bench of connections reads from NCCL's log, and how it stands in for other ranks."""

from __future__ import annotations

import pytest
import torch

from scripts.bench.connect_ranks import _nccl_says
from scripts.bench.parallel_denoise import CopyingRanks

LOG = """\
host:1:2 [0] NCCL INFO 24 coll channels, 24 collnet channels, 0 nvls channels, 32 p2p channels, 32 p2p channels per peer
host:1:2 [0] NCCL INFO Init timings - ncclCommInitRank: rank 0 nranks 2 total 0.35 (kernels 0.26, alloc 0.03, bootstrap 0.03, \
allgathers 0.00, topo 0.01, graphs 0.00, connections 0.01, rest 0.00)
"""


def test_nccl_says_how_long_its_parts_took() -> None:
    found = _nccl_says(LOG)
    assert found["channels"] == [24, 32]
    assert found["library_s"]["kernels"] == 0.26
    assert sum(found["library_s"].values()) == pytest.approx(0.34)


def test_another_version_may_say_nothing() -> None:
    assert _nccl_says("") == {"library_s": {}, "channels": []}


def test_what_others_would_send_is_copied_from_what_is_here() -> None:
    ranks = CopyingRanks(0, 2)
    part = torch.arange(6.0).view(3, 2)
    gathered = torch.full((6, 2), torch.nan)
    ranks.all_gather(gathered, part).wait()
    assert torch.equal(gathered, torch.cat([part, part]))
    exchanged = torch.full((5, 2), torch.nan)
    ranks.all_to_all(exchanged, part, [2, 3], [2, 1]).wait()
    assert torch.equal(exchanged, torch.cat([part[:2], part]))
