"""One MiniMax-H3 request on one device: conditioning, the denoising stage, the two decoders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runtime.families.minimax_h3.config import CONDITION_TIMESTEP, H3Config
from runtime.families.minimax_h3.model.adaln import ModulationTables
from runtime.families.minimax_h3.model.audio_vae import AudioDecoder
from runtime.families.minimax_h3.model.conditioner import encode_prompt
from runtime.families.minimax_h3.model.decode_units import (
    AudioBeside,
    AudioUnits,
    StartedDecoder,
    VideoUnits,
)
from runtime.families.minimax_h3.model.refiner import refine_text
from runtime.families.minimax_h3.model.transformer import Transformer
from runtime.families.minimax_h3.model.video_decoder import VideoDecoder
from runtime.families.minimax_h3.model.video_encoder import encode_keyframe
from runtime.families.minimax_h3.model.vision import image_patches
from runtime.families.minimax_h3.noise import Noise, NoiseMode, draw_noise, noised_keyframe
from runtime.families.minimax_h3.packing import PackedSequence, patchify
from runtime.families.minimax_h3.tokens import TokenStream
from runtime.family import Decoder, Latents, MediaPlan, Step
from runtime.ops.decoder import EAGER, DecoderOperators
from runtime.samplers import euler_step
from runtime.schedules import Schedule
from runtime.weights import WeightSource

if TYPE_CHECKING:
    import numpy


@dataclass(frozen=True)
class JobInput:
    """Everything about a request that was prepared without torch.

    Attributes:
        keyframes: [H, W, 3] uint8 pictures at the canvas size, in packed order.
        table_key: `<schedule>.<task>` of the modulation tables; condition_index: see `ModulationTables`.
    """

    config: H3Config
    media: MediaPlan
    schedule: Schedule
    tokens: TokenStream
    sequence: PackedSequence
    keyframes: tuple[numpy.ndarray[Any, Any], ...]
    seed: int
    noise_mode: NoiseMode
    table_key: str
    condition_index: tuple[int, ...] | None


@dataclass(frozen=True)
class JobParts:
    """What a job is made of; each part may be replaced by one of the same form, as several ranks do."""

    encode_prompt: Callable[..., Tensor] = encode_prompt
    refine_text: Callable[..., Tensor] = refine_text
    transformer: Callable[[H3Config, WeightSource, ModulationTables], Transformer] = Transformer
    video_units: Callable[[JobInput, VideoDecoder], StartedDecoder] | None = None
    decoder_operators: DecoderOperators = EAGER


_ONE_RANK = JobParts()


class H3Job:
    """See `runtime.family.Job`."""

    def __init__(
        self, given: JobInput, weights: WeightSource, device: str, parts: JobParts = _ONE_RANK
    ) -> None:
        self.media = given.media
        self._given = given
        self._weights = weights
        self._device = device
        self._parts = parts
        self._noise: Noise | None = None
        self._condition_rows: Tensor | None = None
        tables = ModulationTables(weights, given.table_key, given.condition_index)
        self._transformer = parts.transformer(given.config, weights, tables)

    @torch.inference_mode()
    def condition(self) -> None:
        """Noise and keyframe latents, prompt embeds, refined text, per-request constants."""
        given, parts = self._given, self._parts
        with ThreadPoolExecutor(1, "noise") as beside:  # drawn while the conditioner waits for its layers
            noise = beside.submit(self._draw_noise)
            patches = [image_patches(picture, given.config) for picture in given.keyframes]
            self._condition_rows = self._keyframe_rows(noise.result().keyframes if given.keyframes else ())
            prompt_embeds = parts.encode_prompt(
                given.config, self._weights, given.tokens, patches, self._device
            )
            text = parts.refine_text(given.config, self._weights, prompt_embeds)
            self._transformer.begin(text, given.sequence)
            self._noise = noise.result()

    def stages(self) -> Sequence[DenoisingStage]:
        noise, rows = self._noise, self._condition_rows
        assert noise is not None, "condition() comes first"
        assert rows is not None, "condition() comes first"
        return (DenoisingStage(self._given, self._transformer, noise, rows, self._device),)

    def decoders(self) -> Mapping[str, Decoder]:
        """For one decode: the video decoder is started by the audio decoder."""
        given, parts = self._given, self._parts
        decoder = VideoDecoder(
            given.config.video_vae, self._weights, self._device, operators=parts.decoder_operators
        )
        video: StartedDecoder = (
            VideoUnits(given.sequence.latent_shape, given.config.transformer.patch_size, decoder)
            if parts.video_units is None
            else parts.video_units(given, decoder)
        )
        audio = AudioUnits(AudioDecoder(given.config.audio_vae, self._weights, self._device))
        return {"video": video, "audio": AudioBeside(audio, video, self._device)}

    def report(self) -> Mapping[str, object]:
        assert self._noise is not None, "condition() comes first"
        sequence = self._given.sequence
        return {
            "noise_sha256": self._noise.sha256(),
            "rows": {
                "text": sequence.num_text,
                "keyframes": sequence.num_condition,
                "audio": sequence.num_audio,
                "video": sequence.num_video,
            },
            "evaluations": self._given.schedule.evaluations,
        }

    def _draw_noise(self) -> Noise:
        given = self._given
        return draw_noise(
            given.config,
            given.seed,
            given.sequence.latent_shape,
            given.sequence.num_audio_latents,
            len(given.keyframes),
            given.noise_mode,
        )

    def _keyframe_rows(self, noise: Sequence[Tensor]) -> Tensor:
        """[Ncond, video_row_dim] float32 on the device; written once, never stepped."""
        given = self._given
        patch = given.config.transformer.patch_size
        rows = [torch.empty(0, given.config.transformer.video_row_dim)]
        for picture, keyframe_noise in zip(given.keyframes, noise, strict=True):
            pixels = torch.from_numpy(picture)
            latents = encode_keyframe(pixels, given.config.video_vae, self._weights, self._device)
            rows.append(
                patchify(noised_keyframe(latents.unsqueeze(0), keyframe_noise, CONDITION_TIMESTEP), patch)
            )
        return torch.cat(rows).to(self._device)


class DenoisingStage:
    """The one stage of MiniMax-H3: both modalities share the index of the schedule."""

    def __init__(
        self, given: JobInput, transformer: Transformer, noise: Noise, condition_rows: Tensor, device: str
    ) -> None:
        self.steps = tuple(_steps(given.schedule))
        self._patch = given.config.transformer.patch_size
        self._transformer = transformer
        self._noise = noise
        self._condition_rows = condition_rows
        self._device = device

    def start(self, previous: Latents | None) -> Latents:
        """Unit noise in row form: video [Nv, C*4], audio [Na, A], float32."""
        video = patchify(self._noise.video.to(self._device), self._patch)
        return {"video": video, "audio": self._noise.audio.to(self._device)}

    @torch.inference_mode()
    def denoiser(self, latents: Latents, step: Step) -> Latents:
        video_rows = torch.cat((self._condition_rows, latents["video"]))
        velocity = self._transformer.forward(video_rows, latents["audio"], step.evaluation)
        return {"video": velocity.video, "audio": velocity.audio}

    @torch.inference_mode()
    def sampler(self, latents: Latents, velocity: Latents, step: Step) -> Latents:
        return {
            name: euler_step(
                latents[name],
                velocity[name],
                step.timesteps[name],
                step.sigmas[name],
                step.next_sigmas[name],
            )
            for name in latents
        }


def _steps(schedule: Schedule) -> Iterator[Step]:
    for e in range(schedule.evaluations):
        yield Step(
            evaluation=e,
            timesteps={"video": schedule.video_timesteps[e], "audio": schedule.audio_timesteps[e]},
            sigmas={"video": schedule.video_sigmas[e], "audio": schedule.audio_sigmas[e]},
            next_sigmas={"video": schedule.video_sigmas[e + 1], "audio": schedule.audio_sigmas[e + 1]},
        )
