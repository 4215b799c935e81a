"""float16 block linears of a prepared directory: a worker uses them as they lie, and decodes as from the published ones."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from loader.manifest import read_manifest
from prepare.family import PrepareOptions
from prepare.pipeline import prepare_checkpoint
from runtime.families.minimax_h3.config import H3Config
from runtime.families.minimax_h3.model.video_decoder_network import DecoderNetwork


class _Groups:
    """The part of a weight source that the decoder asks for."""

    def __init__(self, directory: Path) -> None:
        manifest = read_manifest(directory)
        stored = load_file(directory / "weights" / "vae-1.safetensors")
        self.groups: dict[str, dict[str, Tensor]] = {}
        for record in manifest.tensors.values():
            name = manifest.local_name(record.name)
            if record.group is not None and record.group.startswith("vae/"):
                self.groups.setdefault(record.group, {})[name] = stored[name]

    def tensors(self, group: str) -> dict[str, Tensor]:
        return self.groups[group]


def test_stored_linears_decode_bit_for_bit_like_cast_ones_and_are_not_copied(
    tmp_path: Path, prepared: Path, diffusers_checkpoint: Path
) -> None:
    options = PrepareOptions(tasks=("t2va",), schedules=("base-1",), vae_linears="float32")
    prepare_checkpoint(diffusers_checkpoint, tmp_path / "wide", options)
    config = H3Config.from_dict(read_manifest(prepared).config).video_vae
    half, wide = _Groups(prepared), _Groups(tmp_path / "wide")
    name = "decoder.transformer_blocks.0.ff.net.2.weight"
    assert half.tensors("vae/decoder.blocks.0")[name].dtype == torch.float16
    assert wide.tensors("vae/decoder.blocks.0")[name].dtype == torch.float32
    networks = [
        DecoderNetwork(config, source, torch.device("cpu"), "fp16_linears")  # type: ignore[arg-type]
        for source in (half, wide)
    ]
    latents = torch.randn(1, config.latent_channels, 2, 2, 3, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        first, second = (network.forward(latents) for network in networks)
    assert torch.equal(first, second)
    used = networks[0]._block_weights(0)
    stored = half.tensors("vae/decoder.blocks.0")
    assert all(used[key].data_ptr() == stored[key].data_ptr() for key in stored)
