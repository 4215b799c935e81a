"""The decoders of a job: what is begun when, and that the sound beside the pictures changes neither."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from loader.errors import InternalError
from runtime.families.minimax_h3.model.audio_vae import AudioDecoder
from runtime.families.minimax_h3.model.decode_units import AudioBeside, AudioUnits, VideoUnits
from runtime.families.minimax_h3.model.video_decoder import VideoDecoder
from runtime.families.minimax_h3.packing import pack_audio, patchify
from scripts.bench.decode_weights import RandomDecoderWeights
from scripts.tiny_presets import preset

CONFIG = preset("test").model
PATCH = CONFIG.transformer.patch_size
SHAPE = (12, 4, 4)


def latents(device: str = "cpu") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    video = torch.randn(1, CONFIG.video_vae.latent_channels, *SHAPE, generator=generator)
    audio = torch.randn(2, CONFIG.audio_vae.latent_channels, 9, generator=generator)
    return {"video": patchify(video, PATCH).to(device), "audio": pack_audio(audio).to(device)}


class Journal:
    """Stands for both decoders; notes what is computed."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def units(self, latents: Tensor) -> Iterator[Tensor]:
        for unit in range(3):
            self.lines.append(f"picture {unit}")
            yield torch.full((2, 3, 4, 4), 0.1 * unit)

    def decode(self, latents: Tensor) -> Tensor:
        self.lines.append("sound")
        return torch.linspace(-1, 1, 16).view(2, 8)


def of_journal(journal: Any) -> tuple[AudioBeside, VideoUnits]:
    video = VideoUnits(SHAPE, PATCH, journal)
    return AudioBeside(AudioUnits(journal), video, "cpu"), video


def test_the_first_unit_is_queued_before_the_sound_and_not_again() -> None:
    journal = Journal()
    audio, video = of_journal(journal)
    assert len(list(audio.units(latents()))) == 1
    assert journal.lines == ["picture 0", "sound"]
    units = video.units(latents())
    assert next(units).num_frames == 2
    assert journal.lines == ["picture 0", "sound"]
    assert len(list(units)) == 2
    assert journal.lines == ["picture 0", "sound", "picture 1", "picture 2"]


def test_pictures_alone_need_no_start() -> None:
    journal = Journal()
    _, video = of_journal(journal)
    assert len(list(video.units(latents()))) == 3
    assert journal.lines == ["picture 0", "picture 1", "picture 2"]


@pytest.mark.parametrize("modality", ["video", "audio"])
def test_latents_that_are_not_finite_are_named(modality: str) -> None:
    bad = latents()
    bad[modality][1, 0] = float("nan")
    audio, video = of_journal(Journal())
    with pytest.raises(InternalError, match=f"{modality} latents"):
        list(audio.units(bad)) + list(video.units(bad))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_beside_the_pictures_or_alone_the_bits_are_the_same(device: str) -> None:
    weights = RandomDecoderWeights(CONFIG, device, torch.float32)
    given = latents(device)

    def decoders() -> tuple[AudioUnits, VideoUnits]:
        video = VideoUnits(SHAPE, PATCH, VideoDecoder(CONFIG.video_vae, weights, device))
        return AudioUnits(AudioDecoder(CONFIG.audio_vae, weights, device)), video

    def bytes_of(video: VideoUnits) -> list[bytes]:
        found = []
        for unit in video.units(given):
            target = bytearray(unit.num_frames * 64 * 64 * 3 // 2)
            if (arrived := unit.copy_into(memoryview(target))) is not None:
                arrived()
            found.append(bytes(target))
        return found

    audio, video = decoders()
    (alone,), pictures = audio.units(given), bytes_of(video)
    audio, video = decoders()
    for _ in range(3):  # whatever the two streams do first
        (beside,) = AudioBeside(audio, video, device).units(given)
        assert np.array_equal(beside, alone)
        assert bytes_of(video) == pictures
        video = decoders()[1]
    assert alone.std() > 0
    assert [len(unit) for unit in pictures] == [17 * 6144, 22 * 6144]
