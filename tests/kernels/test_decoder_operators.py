"""The video decoder's kernels through Triton's interpreter and the run-time path, against the eager operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.catalog import MINIMAX_H3, ModelSizes, specialisations
from runtime.ops.decoder import EAGER

EPS = 1e-5
SIZES = ModelSizes(64, 32, 16, 64, 32, decoder_width=96, decoder_head_dim=32, decoder_rotary_dim=24)
HEADS = 3


@pytest.fixture(scope="module")
def fused(interpreted: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    from runtime.ops.fused_decoder import FusedDecoderOperators
    from tests.kernels.interpreter import fake_kernels

    kernels, driver = fake_kernels(tmp_path_factory.mktemp("kernels"), SIZES)
    return FusedDecoderOperators(kernels), driver


def close(found: Tensor, expected: Tensor) -> None:
    """fp16 has 11 bits; a norm summed in another order, or the last bit of exp, moves a value by one step of 2^-11."""
    assert found.dtype == expected.dtype == torch.float16
    torch.testing.assert_close(found.float(), expected.float(), rtol=2**-10, atol=1e-6)
    assert (found == expected).float().mean() > 0.98


def names(driver: Any) -> list[str]:
    return [name for name, _, _ in driver.launches]


@pytest.mark.parametrize(("batch", "tokens"), [(1, 5), (3, 7)])
def test_norm_and_rotation(fused: tuple[Any, Any], batch: int, tokens: int) -> None:
    operators, driver = fused
    torch.manual_seed(batch)
    qkv = torch.randn(batch, tokens, 3 * HEADS * 32).half() * 3
    angles = torch.randn(tokens, 1, 12).tile(2)
    expected = EAGER.rotated_qkv(qkv.clone(), angles.cos(), angles.sin(), HEADS, EPS)

    found = operators.rotated_qkv(qkv.clone(), angles.cos(), angles.sin(), HEADS, EPS)

    assert names(driver)[-1] == "decoder_qk_norm_rope"
    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        close(ours, theirs)
    assert torch.equal(found[2], expected[2])


@pytest.mark.parametrize("rows", [1, 6])
def test_residual_and_norm(fused: tuple[Any, Any], rows: int) -> None:
    operators, driver = fused
    torch.manual_seed(rows)
    hidden, update = torch.randn(2, rows, 96) * 1e5, torch.randn(2, rows, 96).half() * 100
    scale, weight = torch.randn(96), torch.randn(96)
    expected = EAGER.residual_norm(hidden.clone(), update, scale, weight, EPS)

    total, normed = operators.residual_norm(hidden.clone(), update, scale, weight, EPS)

    assert names(driver)[-1] == "decoder_residual_norm"
    assert torch.equal(total, expected[0])  # two roundings, both the same
    close(normed, expected[1])


@pytest.mark.parametrize("width", [16, 2064])
def test_swiglu(fused: tuple[Any, Any], width: int) -> None:
    operators, driver = fused
    torch.manual_seed(width)
    inner = torch.randn(2, 3, 2 * width).half() * 4

    found = operators.swiglu(inner)

    assert names(driver)[-1] == "decoder_swiglu"
    close(found, EAGER.swiglu(inner))


def test_other_types_and_sizes_run_eagerly(fused: tuple[Any, Any]) -> None:
    operators, driver = fused
    before = len(driver.launches)
    inner = torch.randn(2, 3, 64)
    assert torch.equal(operators.swiglu(inner), EAGER.swiglu(inner))
    hidden, update = torch.randn(1, 2, 80), torch.randn(1, 2, 80).half()
    ones = torch.ones(80)
    found = operators.residual_norm(hidden.clone(), update, ones, ones, EPS)
    for ours, theirs in zip(found, EAGER.residual_norm(hidden, update, ones, ones, EPS), strict=True):
        assert torch.equal(ours, theirs)
    assert len(driver.launches) == before


def test_the_released_sizes_have_kernels() -> None:
    wanted = {item.key() for item in specialisations(MINIMAX_H3)}
    assert ("decoder_qk_norm_rope", (("HALF", 24), ("K", 64))) in wanted
    assert ("decoder_residual_norm", (("D", 2048),)) in wanted
    assert ("decoder_swiglu", ()) in wanted


def test_a_fused_decoder_stays_close_to_the_eager_one(fused: tuple[Any, Any]) -> None:
    from runtime.families.minimax_h3.model.video_decoder_network import DecoderNetwork
    from tests.fakes.h3_vae import video_oracle, video_parts

    operators, driver = fused
    overrides = {"decoder_num_attention_heads": 3, "block_out_channels": (4, 4, 4, 4), "norm_num_groups": 2}
    config, weights = video_parts(video_oracle(0, **overrides))
    latents = torch.randn(1, 4, 7, 2, 3)
    device = torch.device("cpu")
    with torch.inference_mode():
        eager = DecoderNetwork(config, weights, device, "fp16_linears").forward(latents)
        exact = DecoderNetwork(config, weights, device, "fp32").forward(latents)
        before = len(driver.launches)
        ours = DecoderNetwork(config, weights, device, "fp16_linears", operators).forward(latents)
    assert len(driver.launches) - before == 4 * config.decoder_num_layers - 1
    # float16 products alone move pixels by this much against float32; the kernels may not add to it
    assert (ours - exact).abs().max() < 2 * (eager - exact).abs().max()
