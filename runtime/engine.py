"""A started worker: one device, one prepared directory, one request at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.encoders import Encoders
from runtime.pipeline import Hooks, generate
from runtime.timeline import Timeline

if TYPE_CHECKING:
    from loader.manifest import Manifest
    from loader.progress import LoadMark
    from loader.verify import Rehash
    from runtime.compute import Compute
    from runtime.family import Family, ImageResolver, Job, Prepared
    from runtime.media.fragments import Receiver
    from runtime.settings import Settings
    from runtime.weights import WeightSet

# Loader mark → headline mark. "all weights" ends when the last group is in place.
_LOADER_MARKS = {
    "first byte": "first_read",
    "cuda context": "context_ready",
    "all weights": "all_weights_resident",
}


class Engine:
    """Runs requests. Made by `runtime.bootstrap.start`; a context manager that closes the loader."""

    def __init__(
        self,
        settings: Settings,
        timeline: Timeline,
        manifest: Manifest,
        family: Family,
        weights: WeightSet,
        compute: Compute,
    ) -> None:
        self.settings = settings
        self.timeline = timeline
        self.manifest = manifest
        self.family = family
        self.weights = weights
        self.compute = compute
        self.device = compute.device
        self.encoders = Encoders(settings, self.device)
        self._recording = threading.Lock()
        self._num_recorded = 0  # marks of the load that are on the timeline
        self._rehash: Rehash | None = None

    def prepare(self, body: Mapping[str, object], resolve_image: ImageResolver | None = None) -> Prepared:
        """Validate a request and prepare what needs no torch. Raises: RequestError."""
        return self.family.prepare(self.family.parse(body, resolve_image))

    def start_job(self, prepared: Prepared) -> Job:
        """A job whose weights are loaded or loading."""
        self.weights.ensure(self.manifest.orders[prepared.order])
        return self.family.start(prepared, self.weights, self.compute)

    def run(
        self,
        prepared: Prepared,
        output: Path,
        *,
        timeline: Timeline | None = None,
        cancelled: threading.Event | None = None,
        on_phase: Callable[[str], None] | None = None,
        on_step: Callable[[int, int], None] | None = None,
        on_frames: Callable[[int, int], None] | None = None,
        receiver: Receiver | None = None,
    ) -> dict[str, object]:
        """Generate one video at `output`.

        Args:
            timeline: where to record; the start's own for the first request (default), a new one for later requests.
            cancelled, on_phase, on_step, on_frames: see `runtime.pipeline.Hooks`.
            receiver: gets the video as a fragmented MP4 while it is decoded; its failure ends the request.
        Returns: the request's report and the run's figures, JSON-ready.
        Raises: pipeline.Cancelled, WorkerError.
        """
        optional: dict[str, Any] = {"on_phase": on_phase, "on_step": on_step, "on_frames": on_frames}
        cancelled = cancelled or threading.Event()
        hooks = Hooks(
            timeline=timeline or self.timeline,
            cancelled=cancelled,
            synchronize=self.synchronize,
            on_first_step=lambda: self.encoders.start(prepared.media),
            **{name: call for name, call in optional.items() if call is not None},
        )
        job = self.start_job(prepared)
        encoder = {**self.encoders.options, "receiver": receiver}
        with self.cancellable_waits(cancelled):
            figures = generate(job, output, hooks, encoder, self.encoders.pool)
        return {**prepared.report, **figures}

    def cancellable_waits(self, cancelled: threading.Event) -> AbstractContextManager[None]:
        """Within it waits for weights end when the event is set."""
        return self.weights.cancelled_by(cancelled)

    def synchronize(self) -> None:
        """Wait until the device has done everything that was asked of it."""
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()

    def wait_resident(self, on_progress: Callable[[int, int], None], every_s: float) -> None:
        """Block until everything the start asked for is in place, reporting (bytes in place, bytes in all).

        Raises: the failure that stopped the load.
        """
        stream = self.weights.streams[0]
        sizes = {group.name: group.end - group.start for group in self.manifest.groups.values()}
        missing = [group.name for group in stream.plan.groups]
        total = sum(sizes[name] for name in missing)
        while missing := [name for name in missing if not stream.is_ready(name)]:
            if stream.failure is not None:
                raise stream.failure
            on_progress(total - sum(sizes[name] for name in missing), total)
            time.sleep(every_s)
        on_progress(total, total)

    def rehash(self, threads: int) -> None:
        """Hash every byte of the prepared directory, other ranks' shards too, and wait for it; `close` ends it.

        Args: threads: of a process with the lowest priority.
        Raises: ArtifactError: damage, names file and tensors. CapabilityError: it cannot be done here. StreamClosed.
        """
        from loader.load_plan import plan_load
        from loader.manifest import read_manifest
        from loader.verify import start_rehash

        directory = Path(self.settings.bundle)
        whole = read_manifest(directory, self.manifest.sha256)
        self._rehash = start_rehash(plan_load(whole, list(whole.groups)), directory, threads=threads)
        self._rehash.wait()

    def write_timeline(self) -> str | None:
        """Write the start's timeline where the settings want it, with the loader's spans; its path, or None."""
        with self._recording:
            self._record_load()
        if not self.settings.timeline:
            return None
        from runtime.timeline_views import write_json, write_svg

        path = Path(self.settings.timeline)
        order = self.timeline.facts.get("order")
        write_json(self.timeline, path)
        write_svg(
            self.timeline,
            path.with_suffix(".svg"),
            f"Start of {self.manifest.model['family']}, {order}, {self.device}",
        )
        return str(path)

    def _record_load(self) -> None:
        """Put on the timeline what the first stream has noted since it was last asked; components once all are there."""
        marks = self.weights.streams[0].marks()
        news = marks[self._num_recorded :]
        for mark in news:
            thread = "groups" if mark.name.startswith("group ") else mark.thread
            self.timeline.add_span(mark.name, mark.start_ns, mark.end_ns, thread=thread, bytes=mark.bytes)
            if mark.name in _LOADER_MARKS:
                self.timeline.mark(_LOADER_MARKS[mark.name], mark.end_ns)
        self._num_recorded = len(marks)
        if any(mark.name == "all weights" for mark in news):
            self._record_components(marks)

    def _record_components(self, marks: Sequence[LoadMark]) -> None:
        components: dict[str, tuple[int, int, int]] = {}
        for mark in marks:
            if mark.name.startswith("group "):
                component = mark.name.removeprefix("group ").partition("/")[0]
                start, end, size = components.get(component, (mark.start_ns, mark.end_ns, 0))
                span = min(start, mark.start_ns), max(end, mark.end_ns), size + mark.bytes
                components[component] = span
        for component, (start, end, size) in components.items():
            gbps = size / max(end - start, 1)
            self.timeline.add_span(
                f"load {component}", start, end, thread="weights", bytes=size, gbps=round(gbps, 2)
            )

    def close(self) -> None:
        if self._rehash is not None:
            self._rehash.close()
        self.encoders.close()
        self.weights.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
