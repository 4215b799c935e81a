"""The decoders of one job (`runtime.family.Decoder`): pictures unit by unit, and the sound beside the first of them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from runtime.families.minimax_h3.model.audio_vae import AudioDecoder
from runtime.families.minimax_h3.model.finite import require_finite
from runtime.families.minimax_h3.model.picture_units import DecodedUnit
from runtime.families.minimax_h3.model.video_decoder import VideoDecoder
from runtime.families.minimax_h3.packing import unpack_audio, unpatchify
from runtime.family import Decoder, Latents

if TYPE_CHECKING:
    import numpy


class StartedDecoder(Decoder, Protocol):
    """A decoder whose first unit can be begun before it is asked for."""

    def start(self, latents: Latents) -> None: ...


class VideoUnits:
    """Video latents to pictures, checked and rounded to bytes on the device. One video.

    Args:
        latent_shape: (latent frames, latent height, latent width). patch_size: latents of one row, the same way.
    """

    def __init__(
        self, latent_shape: tuple[int, int, int], patch_size: tuple[int, int, int], decoder: VideoDecoder
    ) -> None:
        self._latent_shape, self._patch_size = latent_shape, patch_size
        self._decoder = decoder
        self._rest: Iterator[DecodedUnit] | None = None
        self._first: DecodedUnit | None = None

    def start(self, latents: Latents) -> None:
        """Queue the first unit; a CUDA device decodes it while the caller does something else. Raises: InternalError."""
        self._rest = self._units(latents)
        self._first = next(self._rest)

    def units(self, latents: Latents) -> Iterator[DecodedUnit]:
        """One per temporal unit, its pictures perhaps still being computed; checked when they arrive.

        Raises: InternalError: latents are not finite; a unit's copy raises it for pixels.
        """
        if self._rest is None:
            self.start(latents)
        assert self._rest is not None, "start has just made it"
        assert self._first is not None, "start has just made it"
        first, self._first = self._first, None  # its memory is the caller's from now on
        yield first
        del first
        yield from self._rest

    @torch.inference_mode()
    def frames(self, latents: Latents) -> Iterator[Tensor]:
        """[F, 3, H, W] float32 in [0, 1] on the device per temporal unit. Raises: InternalError: bad latents."""
        require_finite(latents["video"], "video latents")
        video = unpatchify(latents["video"], self._latent_shape, self._patch_size)
        yield from self._decoder.units(video[0])

    @torch.inference_mode()
    def _units(self, latents: Latents) -> Iterator[DecodedUnit]:
        for frames in self.frames(latents):
            yield DecodedUnit(frames)


class AudioUnits:
    """Audio latents to one piece of sound."""

    def __init__(self, decoder: AudioDecoder) -> None:
        self._decoder = decoder

    @torch.inference_mode()
    def units(self, latents: Latents) -> Iterator[numpy.ndarray[Any, Any]]:
        """[2, samples] float32. Raises: InternalError: latents or samples are not finite."""
        require_finite(latents["audio"], "audio latents")
        samples = self._decoder.decode(unpack_audio(latents["audio"]))
        require_finite(samples, "decoded audio")
        yield samples.cpu().numpy()


class AudioBeside:
    """Sound, decoded while the device works on the first video unit: its many small kernels leave most of a GPU idle, and
    its end has to be waited for on the host.

    On CUDA it has a stream of its own, of higher priority: its kernels come in between those of the video.
    """

    def __init__(self, audio: Decoder, video: StartedDecoder, device: torch.device | str) -> None:
        self._audio, self._video = audio, video
        self._device = torch.device(device)

    def units(self, latents: Latents) -> Iterator[Any]:
        """Raises: InternalError: see `VideoUnits.start` and `AudioUnits.units`."""
        if self._device.type != "cuda":
            self._video.start(latents)
            yield from self._audio.units(latents)
            return
        stream = _audio_stream(self._device)
        stream.wait_stream(
            torch.cuda.current_stream(self._device)
        )  # for the latents; not for the video behind them
        self._video.start(latents)
        with torch.cuda.stream(stream):  # not around a yield: the caller's work has its own stream
            parts = list(self._audio.units(latents))
        yield from parts


@functools.cache
def _audio_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all requests: torch keeps freed memory for the stream that it was used on."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
