"""Real cubins on a real device, launched without triton: every operator against float64 and the eager form."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels.attention import DenseAttention, choose_backend, warm_up
from kernels.catalog import MINIMAX_H3, architecture_of
from kernels.cubin import KernelSet, open_kernels
from kernels.ops import Operators
from prepare.compile import KERNEL_FOLDER, compile_kernels
from scripts.bench.fused_cases import CASES
from scripts.bench.fused_operators import check

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelSet]:
    directory = tmp_path_factory.mktemp("prepared")
    capability = torch.cuda.get_device_capability()
    documents = compile_kernels(directory, MINIMAX_H3, [architecture_of(capability)], jobs=4)
    loaded = open_kernels(directory / KERNEL_FOLDER, documents, capability)
    torch.zeros(1, device="cuda")  # the context
    loaded.bind()
    yield loaded
    loaded.close()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", [1, 63, 4722])
def test_operator_is_right(kernels: KernelSet, name: str, rows: int) -> None:
    errors = check(CASES[name], Operators(kernels), rows, seed=rows)
    assert errors["error"] <= 1.05 * errors["eager_error"] + 1e-6


def test_attention_after_warm_up_is_right() -> None:
    device = torch.device("cuda")
    attention = DenseAttention(choose_backend(device, torch.bfloat16))
    warm_up(attention, num_rows=257, num_heads=56, head_dim=128, device=device, dtype=torch.bfloat16)
    q, k, v = torch.randn(257, 3, 56, 128, device=device, dtype=torch.bfloat16).unbind(1)
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(x.double().transpose(0, 1)[None] for x in (q, k, v))
    )
    error = (attention(q, k, v).double() - exact[0].transpose(0, 1)).norm() / exact.norm()
    assert error < 1e-2  # bf16 operands
