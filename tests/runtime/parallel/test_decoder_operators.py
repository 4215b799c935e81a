"""Several ranks decode with the operators of one."""

from __future__ import annotations

from typing import Any

import pytest

from kernels.ops import Operators
from runtime.compute import Compute
from runtime.families.minimax_h3.model.job import H3Job
from runtime.families.minimax_h3.model.parts import one_rank
from runtime.families.minimax_h3.model.ranks_job import RanksJob
from runtime.ops.attention import attention
from runtime.ops.decoder import EAGER
from runtime.ops.fused_decoder import FusedDecoderOperators
from runtime.parallel.connect import silent_connection
from tests.fakes.weights import DictWeights
from tests.runtime.parallel.tiny import job_input


class SomeKernels:
    """Stands for compiled kernels of this machine; nothing is launched."""

    device_type, note = "cpu", None

    def __len__(self) -> int:
        return 1


def operators_of(job: Any) -> Any:
    return job.decoders()["video"]._decoder._network._operators


@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize("size", [1, 2])
def test_ranks_decode_with_the_operators_of_one_rank(size: int, has_kernels: bool) -> None:
    kernels: Any = SomeKernels()
    compute = Compute("cpu", attention, attention, Operators(kernels) if has_kernels else None)
    given, weights = job_input(), DictWeights({})
    alone = operators_of(H3Job(given, weights, "cpu", one_rank(compute)))
    shared = operators_of(RanksJob(given, weights, compute, silent_connection(0, size), is_sharded=False))
    assert type(shared) is type(alone)
    if has_kernels:
        assert isinstance(shared, FusedDecoderOperators)
        assert shared._kernels is alone._kernels is kernels
    else:
        assert shared is alone is EAGER
