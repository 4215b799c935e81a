"""Adapters that peft itself wrote, against peft's own merge on the diffusers model. Skipped where peft is not installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from prepare.family import PrepareOptions, open_source
from tests.prepare.lora_files import prepared_transformer

pytestmark = [
    pytest.mark.oracle,
    # Deprecations inside peft and what it imports; nothing here calls those functions.
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:peft"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:accelerate"),
]
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2"]


@pytest.mark.parametrize("seed", [0, 1])
def test_merge_equals_pefts_own(seed: int, tmp_path: Path, diffusers_checkpoint: Path) -> None:
    peft = pytest.importorskip("peft")
    diffusers = pytest.importorskip("diffusers")
    folder = diffusers_checkpoint / "transformer"
    model = diffusers.MiniMaxH3Transformer3DModel.from_pretrained(folder, torch_dtype=torch.float32)
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=3 + seed, lora_alpha=7, target_modules=TARGETS, init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["lora_alpha"] == 7
    assert len(load_file(tmp_path / "adapter" / "adapter_model.safetensors")) == 2 * 5 * len(TARGETS)

    merged = adapted.merge_and_unload().state_dict()
    found = prepared_transformer(
        diffusers_checkpoint, (tmp_path / "adapter" / "adapter_model.safetensors", 1.0), dtype="float32"
    )
    source = open_source(diffusers_checkpoint, PrepareOptions(tasks=("t2va",)))
    fused = source.recipe.fused["transformer/*.attn.to_qkv.*"]
    for name, value in found.items():
        parts = [part.replace("*.attn", "attn").replace("*", "weight") for part in fused]
        names = [name.replace("attn.to_qkv.weight", part) for part in parts] if "to_qkv" in name else [name]
        # peft adds in float32: an error of a few float32 steps of sums that are about one.
        torch.testing.assert_close(value, torch.cat([merged[n] for n in names]), rtol=1e-6, atol=1e-6)
