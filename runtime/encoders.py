"""The worker's encoder processes: how many, with which options, started while the model denoises."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from runtime.media.encoder_pool import EncoderPool
from runtime.media.unit_encoder import PictureOptions

if TYPE_CHECKING:
    from runtime.family import MediaPlan
    from runtime.settings import Settings

_MOST_PROCESSES = 4  # a unit takes longer to decode than to encode; more only helps at the very end
_MOST_THREADS = 8  # of one session; x264 gains little beyond


class Encoders:
    """Made with the engine, which closes it; costs nothing before `start`."""

    def __init__(self, settings: Settings, device: str) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        processes = settings.encoder_processes or max(1, min(_MOST_PROCESSES, cores // 2))
        self.pool = EncoderPool(processes)
        self.options: dict[str, Any] = {
            "codec": settings.encoder_codec,
            "preset": settings.encoder_preset,
            "crf": settings.encoder_crf,
            "threads": min(_MOST_THREADS, cores),
        }
        self._device = device
        self._starting: threading.Thread | None = None

    def start(self, media: MediaPlan) -> None:
        """Spawn processes, import what muxing needs and reserve memory for this request, beside the caller.

        What fails here fails again, with its error, when the request comes to its first picture.
        """
        self._join()
        options = PictureOptions(media.width, media.height, media.fps, **self.options)
        self._starting = threading.Thread(
            target=self.pool.start_ahead,
            args=(options, media.num_frames, self._device == "cuda"),
            name="encoder-start",
            daemon=True,
        )
        self._starting.start()

    def close(self) -> None:
        """End every process. May be called again."""
        self._join()
        self.pool.close()

    def _join(self) -> None:
        if self._starting is not None:
            self._starting.join()
            self._starting = None
