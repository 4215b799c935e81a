"""The bench of a warm step, dry: tiny sizes on the CPU go through every line but those that need a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kernels.attention import AttentionChoice, DenseAttention
from runtime.families.minimax_h3.model.transformer import block_forward
from scripts.bench import step_rates as rates
from scripts.bench.step_model import RandomWeights, make_evaluation, own_step
from scripts.bench.warm_step import main
from scripts.tiny_presets import preset

TINY = [
    "--preset",
    "test",
    "--device",
    "cpu",
    "--size",
    "64x64",
    "--num-frames",
    "22",
    "--sustain-s",
    "0.001",
]


@pytest.mark.oracle
def test_every_part_runs_and_both_models_agree(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--tokens", "7", "9", "--dtype", "F32", "--rounds", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    figures = report["figures"]
    assert set(figures["steps"]) == {"109", "111"}
    for part in figures["steps"].values():
        # float32 through three blocks, products of other shapes
        assert max(part["difference_to_diffusers"].values()) < 1e-5
        assert part["agrees"]
        assert part["diffusers"]["median_s"] > 0
    assert set(figures["steps"]["109"]) >= {"shipped", "separate", "cublaslt", "diffusers"}
    assert figures["attention"] == "math: device is cpu"
    assert all("device is cpu" in figures[name] for name in ("cudnn", "flash3"))
    assert figures["graph"] == {"skipped": "device is cpu"}
    assert sum(figures["profile"]["shares"].values()) == pytest.approx(1, abs=1e-3)
    assert report["targets"].keys() == {"warm_step_vs_diffusers", "warm_step_vs_rates"}
    assert report["targets"]["warm_step_vs_rates"]["goal"] == 0.9


def test_rates_alone_need_no_peer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--tokens", "7", "--part", "rates"]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert figures["rates"]["products_ms"].keys() == {"default"}
    assert figures["rates"]["attention_ms"]["shipped"].keys() == {"interleaved", "apart", "by_head"}
    assert figures["rates"]["copy_tbps"] >= 0


def test_operations_are_those_of_a_block() -> None:
    """Counted by torch over the eager evaluation, less the projections before and behind the blocks."""
    config = preset("test").model
    weights = RandomWeights(config, "cpu", "F32", with_projections=False)
    given = make_evaluation(config, "cpu", torch.float32, 7, "64x64", 22)
    math = DenseAttention(AttentionChoice("math", "its products are counted"))
    step = own_step(config, weights, given, math, block_forward)
    with FlopCounterMode(display=False) as counter:
        step()
    c, rows = config.transformer, given.sequence
    ends = rows.num_video * c.video_row_dim + rows.num_audio * c.audio_in_channels
    around = 2 * 2 * c.hidden_size * ends
    counted = counter.get_total_flops() - around
    assert counted == c.num_layers * sum(rates.block_operations(c, rows.num_rows).values())


def test_bytes_of_a_released_block() -> None:
    """gate_norm_modulate twice 8 x 5,376; q and k 4 x 7,168; feed-forward 3 x 14,336; bf16."""
    released = preset("full").model.transformer
    assert rates.block_bytes(released, 1000, 2) == 1000 * 2 * (2 * 4 * 5376 + 4 * 7168 + 3 * 14336)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128", "attention"),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<…>>>", "attention"),
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN", "products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x256x64", "products"),
        ("gate_norm_modulate", "fused"),
        ("qk_norm_rope", "fused"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<…>", "copies"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda…", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>…", "other"),
    ],
)
def test_kernels_are_told_apart(kernel: str, kind: str) -> None:
    assert rates.kind_of(kernel) == kind


def test_profile_is_summed_by_kind_and_name() -> None:
    found = rates.summarise([("nvjet_a", 30.0), ("sdpa", 60.0), ("nvjet_a", 10.0), ("add", 0.0)])
    assert found["microseconds"]["products"] == 40
    assert found["shares"]["attention"] == 0.6
    assert found["kernels"][1] == {"name": "nvjet_a", "kind": "products", "calls": 2, "us": 40.0}


def test_tables_and_peer_share_their_memory() -> None:
    """No weight exists twice: a whole model of each would not fit one card."""
    config = preset("test").model
    weights = RandomWeights(config, "cpu", "BF16", with_projections=True)
    fused = weights.tensors("transformer/blocks.1")["transformer_blocks.1.attn.to_qkv.weight"]
    key = weights.published["transformer_blocks.1.attn.to_k.weight"]
    assert key.data_ptr() == fused[len(key) :].data_ptr()
    stored = {tensor.untyped_storage().data_ptr() for tensor in weights.published.values()}
    assert {t.untyped_storage().data_ptr() for t in weights.tensors("transformer/prelude").values()} <= stored


def test_result_is_written_by_full_runs_only(capsys: pytest.CaptureFixture[str]) -> None:
    result = Path(rates.__file__).parent / "results" / "warm_step.json"
    before = result.read_bytes() if result.is_file() else None
    main([*TINY, "--tokens", "7", "--part", "graph"])
    assert (result.read_bytes() if result.is_file() else None) == before
