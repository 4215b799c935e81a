"""Real cubins on a real device, launched without triton: every operator against float64 and the eager form."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from kernels.attention import DenseAttention, choose_backend, warm_up
from kernels.catalog import MINIMAX_H3, architecture_of
from kernels.cubin import KernelSet, open_kernels
from kernels.ops import Operators
from loader.errors import CapabilityError
from prepare.compile import KERNEL_FOLDER, compile_kernels
from runtime.families.minimax_h3.model.fused_block import FusedBlock
from runtime.families.minimax_h3.model.transformer import block_forward
from scripts.bench.fused_cases import CASES
from scripts.bench.fused_operators import check
from scripts.bench.step_model import RandomWeights, make_evaluation, own_step
from scripts.tiny_presets import preset

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


@pytest.mark.parametrize("backend", ["auto", "cudnn", "flash3"])
def test_attention_after_warm_up_is_right(backend: str) -> None:
    device = torch.device("cuda")
    try:
        choice = choose_backend(device, torch.bfloat16, backend)
    except CapabilityError as error:
        pytest.skip(str(error))
    attention = DenseAttention(choice)
    warm_up(attention, num_rows=257, num_heads=56, head_dim=128, device=device, dtype=torch.bfloat16)
    assert attention.choice == choice  # what is installed serves this torch
    q, k, v = torch.randn(257, 3, 56, 128, device=device, dtype=torch.bfloat16).unbind(1)
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(x.double().transpose(0, 1)[None] for x in (q, k, v))
    )
    out = attention(q, k, v)
    error = (out.double() - exact[0].transpose(0, 1)).norm() / exact.norm()
    assert error < 1e-2  # bf16 operands
    assert out.flatten(1).data_ptr() == out.data_ptr()  # joining the heads copies nothing


@torch.inference_mode()
def test_fused_evaluation_stays_close_to_the_eager_one(kernels: KernelSet) -> None:
    """Three blocks of released width; a norm's sum in another order flips single bf16 roundings (2^-8 of the value)."""
    small = preset("full").model
    config = dataclasses.replace(small, transformer=dataclasses.replace(small.transformer, num_layers=3))
    weights = RandomWeights(config, "cuda", "BF16", with_projections=False)
    given = make_evaluation(config, "cuda", torch.bfloat16, 77, "256x256", 22)
    attention = DenseAttention(choose_backend(torch.device("cuda"), torch.bfloat16))
    operators = Operators(kernels)
    fused = own_step(config, weights, given, attention, FusedBlock(operators))()
    eager = own_step(config, weights, given, attention, block_forward)()
    for mine, reference in zip(fused, eager, strict=True):
        assert (mine - reference).norm() <= 2**-6 * reference.norm()
    assert operators.fallbacks == {}
