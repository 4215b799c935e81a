"""From a prompt and a seed to latents, pixels and samples: a worker on a prepared directory against diffusers 0.42.1.

Both read one tiny checkpoint of the published Diffusers layout in float32. The worker's tables are prepared in `match`
mode, so that they equal the live projections; everything else is the worker as it is started for a user.

Tolerance: both sides run the same operations in float32, the worker with fused matrix products. Where a BLAS sums a
fused product in another order the last bits differ and travel through 3 evaluations, hence a few float32 roundings of
values of order 1, not equality.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKLMiniMaxH3,
    AutoencoderKLMiniMaxH3Audio,
    MiniMaxH3Scheduler,
    MiniMaxH3Transformer3DModel,
)
from diffusers.modular_pipelines.minimax_h3 import MiniMaxH3Blocks
from PIL import Image
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from prepare.cli import prepare_main
from runtime.bootstrap import start
from runtime.engine import Engine
from runtime.families.minimax_h3.model.video_vae import to_uint8
from runtime.families.minimax_h3.packing import unpack_audio, unpatchify
from runtime.pipeline import Hooks, denoise
from runtime.settings import Settings
from runtime.timeline import Timeline
from scripts.tiny_checkpoint import write_tiny_checkpoint

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning"),
]

PROMPT = "A lamp sways; rain. <d>[English] We are home.</d> 好 🙂"
EVALUATIONS = 3
LATENT_TOLERANCE = 2e-5  # of values up to about 5 after three evaluations
PIXEL_TOLERANCE = 1e-5  # of values in 0 … 1
SAMPLE_TOLERANCE = 2e-5  # of values in -1 … 1


class Processor:
    """The parts of Qwen3VLProcessor that the pipeline uses; the class itself needs torchvision."""

    def __init__(self, folder: Path, image_token: int) -> None:
        self.image_processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
        self._image_token = image_token

    def create_mm_token_type_ids(self, batch: list[list[int]]) -> list[list[int]]:
        return [[int(token == self._image_token) for token in ids] for ids in batch]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    write_tiny_checkpoint(directory, "test", "diffusers", seed=5)
    return directory


@pytest.fixture(scope="module")
def engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    bundle = tmp_path_factory.mktemp("prepared") / "bundle"
    options = ["--schedule", f"base-{EVALUATIONS}", "--dtype", "float32", "--adaln", "match", "--json"]
    assert prepare_main([str(checkpoint), str(bundle), *options]) == 0
    engine, _ = start(Settings(bundle=str(bundle), device="cpu", schedule=f"base-{EVALUATIONS}"))
    with engine:
        yield engine


@pytest.fixture(scope="module")
def components(checkpoint: Path) -> dict[str, Any]:
    encoder = Qwen3VLForConditionalGeneration.from_pretrained(
        checkpoint / "text_encoder", torch_dtype=torch.float32
    )
    processor = Processor(checkpoint / "processor", encoder.config.image_token_id)
    return {
        "text_encoder": encoder.eval(),
        "tokenizer": AutoTokenizer.from_pretrained(checkpoint / "tokenizer"),
        "processor": processor,
        "vae": AutoencoderKLMiniMaxH3.from_pretrained(checkpoint / "vae", torch_dtype=torch.float32).eval(),
        "audio_vae": AutoencoderKLMiniMaxH3Audio.from_pretrained(
            checkpoint / "audio_vae", torch_dtype=torch.float32
        ).eval(),
        "transformer": MiniMaxH3Transformer3DModel.from_pretrained(
            checkpoint / "transformer", torch_dtype=torch.float32
        ).eval(),
        "scheduler": MiniMaxH3Scheduler(shift=12.0),
        "audio_scheduler": MiniMaxH3Scheduler(shift=3.0),
    }


def picture(seed: int, size: tuple[int, int]) -> Image.Image:
    pixels = torch.randint(
        0, 256, (12, 9, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
    )
    return Image.fromarray(pixels.numpy()).resize(size, Image.Resampling.BICUBIC)


def png(image: Image.Image) -> bytes:
    import io

    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


CASES = {
    "t2va": (64, 64, 124, ()),
    "t2va, not square": (96, 64, 124, ()),
    "fl2va, first": (64, 64, 124, ("first_frame",)),
    "fl2va, last": (64, 64, 124, ("last_frame",)),
    "fl2va, both": (64, 96, 124, ("first_frame", "last_frame")),
}


@pytest.mark.parametrize(("width", "height", "frames", "keyframes"), CASES.values(), ids=CASES)
def test_same_prompt_and_seed_give_the_same_media(
    engine: Engine,
    components: dict[str, Any],
    width: int,
    height: int,
    frames: int,
    keyframes: tuple[str, ...],
) -> None:
    pictures = {name: picture(i, (50 + 30 * i, 80)) for i, name in enumerate(keyframes)}
    expected = run_diffusers(components, width, height, frames, pictures)
    body = {
        "prompt": PROMPT, "width": width, "height": height, "num_frames": frames, "seed": 7,
        "num_evaluations": EVALUATIONS, **{name: png(image) for name, image in pictures.items()},
    }  # fmt: skip
    job = engine.start_job(engine.prepare(body))
    job.condition()
    latents = denoise(job, Hooks(Timeline(), threading.Event()))

    config = engine.family.capabilities.config
    shape = job._given.sequence.latent_shape
    video = unpatchify(latents["video"], shape, config.transformer.patch_size)
    assert_close(video, expected.get("latents"), LATENT_TOLERANCE)
    assert_close(unpack_audio(latents["audio"]), expected.get("audio_latents"), LATENT_TOLERANCE)

    decoders = job.decoders()
    pixels = torch.cat([to_uint8(frames) for frames in decoders["video"].frames(latents)])
    reference = (expected.get("videos")[0].permute(0, 2, 3, 1) * 255).round()
    assert pixels.shape == reference.shape == (frames, height, width, 3)
    # Both are rounded to bytes, so a float32 rounding can move a value that lies on a half by one step.
    difference = (pixels.float() - reference).abs()
    assert difference.max() <= 1
    assert (difference > 0).float().mean() < 255 * PIXEL_TOLERANCE
    (samples,) = decoders["audio"].units(latents)
    assert_close(torch.from_numpy(samples), expected.get("audio")[0], SAMPLE_TOLERANCE)


def run_diffusers(
    components: dict[str, Any], width: int, height: int, frames: int, pictures: dict[str, Image.Image]
) -> Any:
    workflow = "fl2va" if pictures else "t2va"
    pipeline = MiniMaxH3Blocks().get_workflow(workflow).init_pipeline()
    pipeline.update_components(**components)
    names = {"first_frame": "image", "last_frame": "last_image"}
    return pipeline(
        prompt=PROMPT,
        width=width,
        height=height,
        num_frames=frames,
        num_inference_steps=EVALUATIONS + 1,
        generator=torch.Generator().manual_seed(7),
        output_type="pt",
        **{names[name]: image for name, image in pictures.items()},
    )


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    assert torch.isfinite(found).all()
    assert expected.std() > 0.01, "a dead reference would agree with anything"
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
