"""A started worker: one device, one prepared directory, one request at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.pipeline import Hooks, generate
from runtime.timeline import Timeline

if TYPE_CHECKING:
    from loader.manifest import Manifest
    from runtime.family import Family, ImageResolver, Job, Prepared
    from runtime.settings import Settings
    from runtime.weights import WeightSet


class Engine:
    """Runs requests. Made by `runtime.bootstrap.start`; a context manager that closes the loader."""

    def __init__(
        self,
        settings: Settings,
        timeline: Timeline,
        manifest: Manifest,
        family: Family,
        weights: WeightSet,
        device: str,
    ) -> None:
        self.settings = settings
        self.timeline = timeline
        self.manifest = manifest
        self.family = family
        self.weights = weights
        self.device = device

    def prepare(self, body: Mapping[str, object], resolve_image: ImageResolver | None = None) -> Prepared:
        """Validate a request and prepare what needs no torch. Raises: RequestError."""
        return self.family.prepare(self.family.parse(body, resolve_image))

    def start_job(self, prepared: Prepared) -> Job:
        """A job whose weights are loaded or loading."""
        self.weights.ensure(self.manifest.orders[prepared.order])
        return self.family.start(prepared, self.weights, self.device)

    def run(
        self,
        prepared: Prepared,
        output: Path,
        *,
        timeline: Timeline | None = None,
        cancelled: threading.Event | None = None,
        on_phase: Callable[[str], None] | None = None,
        on_step: Callable[[int, int], None] | None = None,
    ) -> dict[str, object]:
        """Generate one video at `output`.

        Args:
            timeline: where to record; the start's own for the first request (default), a new one for later requests.
            cancelled, on_phase, on_step: see `runtime.pipeline.Hooks`.
        Returns: the request's report and the run's figures, JSON-ready.
        Raises: pipeline.Cancelled, WorkerError.
        """
        optional: dict[str, Any] = {"on_phase": on_phase, "on_step": on_step}
        hooks = Hooks(
            timeline=timeline or self.timeline,
            cancelled=cancelled or threading.Event(),
            synchronize=self.synchronize,
            **{name: call for name, call in optional.items() if call is not None},
        )
        figures = generate(self.start_job(prepared), output, hooks)
        return {**prepared.report, **figures}

    def synchronize(self) -> None:
        """Wait until the device has done everything that was asked of it."""
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()

    def record_load(self) -> None:
        """Put the loader's marks on the timeline; call it once the weights are resident or the start has ended."""
        for stream in self.weights.streams:
            for mark in stream.marks():
                self.timeline.add_span(
                    mark.name, mark.start_ns, mark.end_ns, thread=mark.thread, bytes=mark.bytes
                )

    def close(self) -> None:
        self.weights.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
