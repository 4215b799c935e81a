"""The generated checkpoints are what the oracles load, and nothing that they compute from them is flat."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from scripts.tiny_checkpoint import main, write_tiny_checkpoint
from scripts.tiny_presets import preset

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning"),
]


@pytest.fixture(scope="session")
def demo_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    assert main([str(folder), "--preset", "demo", "--seed", "1"]) == 0
    return folder


@pytest.fixture(params=["test", "demo"])
def checkpoint(request: pytest.FixtureRequest, demo_checkpoint: Path, diffusers_checkpoint: Path) -> Path:
    return demo_checkpoint if request.param == "demo" else diffusers_checkpoint


def _load(name: str, checkpoint: Path, folder: str, **options: Any) -> Any:
    import diffusers

    module, info = getattr(diffusers, name).from_pretrained(
        checkpoint / folder, output_loading_info=True, **options
    )
    assert not any(info.values()), info
    return module


def _denormalised(config: Any, noise: torch.Tensor) -> torch.Tensor:
    shape = (1, -1, *([1] * (noise.ndim - 2)))
    return noise * torch.tensor(config.latents_std).view(shape) + torch.tensor(config.latents_mean).view(
        shape
    )


def test_transformer_loads_and_predicts_lively_velocities(checkpoint: Path) -> None:
    model = _load("MiniMaxH3Transformer3DModel", checkpoint, "transformer", torch_dtype=torch.bfloat16)
    assert sum(p.dtype == torch.float32 for p in model.parameters()) == 12
    c, g = model.config, torch.Generator().manual_seed(0)
    num_text, num_audio, num_video = 5, 6, 8
    total = num_text + num_audio + num_video
    tags = torch.tensor([1] * num_text + [2] * num_audio + [0] * num_video)
    rows = torch.arange(total)
    out = model(
        hidden_states=torch.randn(1, num_video, c.in_channels * 4, generator=g),
        audio_hidden_states=torch.randn(1, num_audio, c.audio_in_channels, generator=g),
        encoder_hidden_states=torch.randn(1, num_text, c.text_dim, generator=g).bfloat16(),
        timestep=torch.tensor([0.3, 0.7]),
        timestep_indices=(tags == 2).long(),
        token_tags=tags,
        position_ids=torch.rand(total, 3, generator=g).double() * 10,
        video_indices=rows[tags == 0],
        audio_indices=rows[tags == 2],
        text_indices=rows[tags == 1],
    )
    assert 0.3 < out.sample.std() < 3
    assert 0.3 < out.audio_sample.std() < 3


def test_video_decoder_loads_and_decodes_a_lively_picture(checkpoint: Path) -> None:
    model = _load("AutoencoderKLMiniMaxH3", checkpoint, "vae")
    noise = torch.randn(1, model.config.latent_channels, 7, 2, 2, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        frames = model.decode(_denormalised(model.config, noise)).sample
    assert frames.shape == (1, 3, 22, 32, 32)
    # ImageNet-normalised pixels: black to white is 4.4 to 4.5 wide.
    assert 0.3 < frames.std() < 2
    assert frames[:, :, 0].sub(frames[:, :, 1]).std() > 0.1


def test_audio_decoder_loads_and_decodes_audible_sound(checkpoint: Path) -> None:
    model = _load("AutoencoderKLMiniMaxH3Audio", checkpoint, "audio_vae")
    noise = torch.randn(2, model.config.latent_channels, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        sound = model.decode(_denormalised(model.config, noise)).sample
    assert sound.shape == (2, 1, 6 * model.hop_length)
    assert 0.02 < sound.std() < 0.5
    assert sound.abs().eq(1).float().mean() < 0.01  # hardly any sample is clipped


def test_filters_equal_the_oracles_buffers(demo_checkpoint: Path) -> None:
    from diffusers import AutoencoderKLMiniMaxH3Audio

    stored = load_file(demo_checkpoint / "audio_vae" / "diffusion_pytorch_model.safetensors")
    fresh = AutoencoderKLMiniMaxH3Audio(**json.loads((demo_checkpoint / "audio_vae/config.json").read_text()))
    filters = {name: value for name, value in fresh.state_dict().items() if name.endswith("filter")}
    assert filters
    assert all(torch.equal(stored[name], value) for name, value in filters.items())


def test_text_encoder_loads_and_its_conditioning_layer_differs_by_token(checkpoint: Path) -> None:
    from transformers import Qwen3VLForConditionalGeneration

    model, info = Qwen3VLForConditionalGeneration.from_pretrained(
        checkpoint / "text_encoder", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(info.values()), info
    with torch.no_grad():
        states = model.model(
            input_ids=torch.tensor([[64, 70, 81, 99]]), output_hidden_states=True
        ).hidden_states
    assert len(states) == 53
    assert states[50].isfinite().all()
    assert states[50].float().std(dim=1).min() > 0.01


def test_tokenizer_knows_the_markers_only_through_its_configuration(diffusers_checkpoint: Path) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    folder = diffusers_checkpoint / "tokenizer"
    base = 256 + 40 + 26
    configured = AutoTokenizer.from_pretrained(folder)
    assert configured.convert_tokens_to_ids(["<d>", "<|caption_end|>"]) == [base, base + 6]
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("<d>") is None


def test_demo_has_the_released_rates_and_ratios() -> None:
    model = preset("demo").model
    assert (model.audio_vae.hop_length, model.audio_vae.sampling_rate) == (800, 32_000)
    assert (model.video_vae.spatial_ratio, model.video_vae.temporal_ratio) == (16, 4)


def test_same_seed_gives_the_same_bytes_and_another_seed_does_not(
    tmp_path: Path, diffusers_checkpoint: Path, tree_bytes: Callable[[Path], dict[str, bytes]]
) -> None:
    for name, seed in (("again", 5), ("other", 6)):
        write_tiny_checkpoint(tmp_path / name, "test", "diffusers", seed)
    first, again, other = (
        tree_bytes(folder) for folder in (diffusers_checkpoint, tmp_path / "again", tmp_path / "other")
    )
    assert first == again
    changed = [name for name, data in first.items() if other[name] != data]
    assert changed == [name for name in first if name.endswith(".safetensors")]


def _all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: value
        for path in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(path).items()
    }


def test_native_rows_are_interleaved_per_head_and_gate_comes_first(
    native_checkpoint: Path, diffusers_checkpoint: Path
) -> None:
    """The published layout rules, applied with torch to whole tensors."""
    for native_folder, folder, heads, names in (
        ("transformer", "transformer", 2, ("blocks.1.attn.qkv_proj", "transformer_blocks.1", "mlp.fc1")),
        (
            "video_vae/source",
            "vae",
            2,
            ("decoder.transformer_blocks.1.attn.to_qkv", "decoder.transformer_blocks.1", "ff.w1"),
        ),
    ):
        native, split = (
            _all_tensors(native_checkpoint / "FL2VA" / native_folder),
            _all_tensors(diffusers_checkpoint / folder),
        )
        fused, block, gated = names
        qkv = native[f"{fused}.weight"].unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(1, 2)
        for part, value in zip("qkv", qkv, strict=True):
            assert torch.equal(split[f"{block}.attn.to_{part}.weight"], value)
        gate, up = native[fused.split(".attn.")[0] + f".{gated}.weight"].chunk(2)
        assert torch.equal(split[f"{block}.ff.net.0.proj.weight"], torch.cat((up, gate)))
    assert torch.count_nonzero(native["decoder.mask_token"]) == 0
