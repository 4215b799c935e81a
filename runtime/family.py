"""What a model family must offer, and how one is found. No torch, and no family is imported before it is needed.

The five interfaces meet in `runtime.pipeline`, which runs any family with one loop:
`for stage: for step: latents = stage.sampler(latents, stage.denoiser(latents, step), step)`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from loader.errors import ArtifactError

if TYPE_CHECKING:
    from torch import Tensor

    from loader.manifest import Manifest
    from runtime.compute import Compute
    from runtime.native_torch import NativeTorch
    from runtime.weights import WeightSource


class Registered(NamedTuple):
    """Where a family is, as `module:name`, imported on use: a cold start cannot afford to import them all.

    `likely_order(manifest, body, task, schedule)` is a function in a module of its own, cheap to import: it decides
    what is read, and everything else of the family is imported while the first bytes arrive.
    """

    family: str
    likely_order: str


REGISTRY: Mapping[str, Registered] = {
    "minimax_h3": Registered(
        "runtime.families.minimax_h3.family:MiniMaxH3", "runtime.families.minimax_h3.order:likely_order"
    )
}

Latents = Mapping[str, "Tensor"]
"""Latents, noise or velocity by modality (`video`, `audio`), in the row form of the family's denoiser."""
ImageResolver = Callable[[str], bytes]
"""From a request's picture reference (a URL) to the file's bytes; refuses what it must not fetch."""


@dataclass(frozen=True)
class Step:
    """One update: where it stands in its schedule, by modality. `evaluation` counts forwards from 0."""

    evaluation: int
    timesteps: Mapping[str, float]
    sigmas: Mapping[str, float]
    next_sigmas: Mapping[str, float]


@dataclass(frozen=True)
class MediaPlan:
    """What the finished file will hold."""

    width: int
    height: int
    num_frames: int
    fps: int
    sample_rate: int


@dataclass(frozen=True)
class Prepared:
    """A validated request with everything that can be computed without torch: tokens, pictures, packed layout.

    Attributes:
        order: key into the manifest's `orders`.
        rows: rows of gathered tensors that the job will ask for, by tensor; they are fetched ahead.
        report: what is served, JSON-ready. parts: the family's own.
    """

    request: Any
    order: str
    media: MediaPlan
    report: Mapping[str, object]
    rows: Mapping[str, Sequence[int]] = field(default_factory=dict)
    parts: Mapping[str, Any] = field(default_factory=dict)


class Decoder(Protocol):
    """Latents of one modality to media, piece by piece."""

    def units(self, latents: Latents) -> Iterator[Any]:
        """Video: `runtime.media.units.PictureUnit`s or [F, H, W, 3] uint8 arrays, in order. Audio: one array
        [channels, samples] float32 in [-1, 1]."""
        ...


class Stage(Protocol):
    """One run of the denoiser over one schedule."""

    @property
    def steps(self) -> Sequence[Step]: ...

    def start(self, previous: Latents | None) -> Latents:
        """Initial latents: noise, or the previous stage's result upsampled."""
        ...

    def denoiser(self, latents: Latents, step: Step) -> Latents:
        """Velocity of the target rows; waits for its weights block by block."""
        ...

    def sampler(self, latents: Latents, velocity: Latents, step: Step) -> Latents:
        """Latents of the next step."""
        ...


class Job(Protocol):
    """One request on one device."""

    media: MediaPlan

    def condition(self) -> None:
        """Everything before the first evaluation: prompt embeds, refiner, keyframe latents, constants."""
        ...

    def stages(self) -> Sequence[Stage]: ...

    def decoders(self) -> Mapping[str, Decoder]: ...

    def report(self) -> Mapping[str, object]:
        """What only the run knows, for the result (noise hash, rows)."""
        ...


class Family(Protocol):
    """One prepared directory of one family. Everything here is torch-free except the body of `start`."""

    capabilities: Any

    def parse(self, body: Mapping[str, object], resolve_image: ImageResolver | None = None) -> Any:
        """Validated request. Raises: RequestError naming the field."""
        ...

    def spawn_tokenizer(self) -> None:
        """Have a process load what the next `prepare` needs: it would keep the interpreter lock here. Or do nothing."""
        ...

    def stop_tokenizer(self) -> None:
        """End that process, if there is one."""
        ...

    def prepare(self, request: Any) -> Prepared:
        """Tokens, pictures and packed layout. Raises: RequestError (prompt too long, picture unusable)."""
        ...

    def import_models(self) -> None:
        """Import the numerical modules, so that no import is left for the first request."""
        ...

    def warm_up(self, prepared: Prepared | None, compute: Compute) -> None:
        """Without a request: run every kind of work of one once, on weights of zeros. With one: what its denoiser
        needs on the thread that denoises."""
        ...

    def native_operations(
        self, prepared: Prepared | None, native: NativeTorch, items: Collection[str]
    ) -> Iterator[str]:
        """What a waiting request uses first, through torch's C interface; see `runtime.native_warm_up.Operations`.

        Args:
            prepared: None with items of any request.
        """
        ...

    def warm_up_libraries(self, prepared: Prepared, device: str) -> None:
        """What of `warm_up_conditioner` needs torch alone: it runs, on any thread, while the models are imported."""
        ...

    def warm_up_conditioner(self, prepared: Prepared, compute: Compute) -> None:
        """Run every kind of work of a waiting request's conditioner once, on weights of zeros, on any thread."""
        ...

    def warm_up_denoiser(self, prepared: Prepared, compute: Compute, items: Sequence[str]) -> bool:
        """Pay for the first evaluation of a waiting request; `items`: of `runtime.settings`, `warm_up`.

        Returns: whether that included what `warm_up` does for the request.
        Raises: RequestError: an item that the family does not have.
        """
        ...

    def start(self, prepared: Prepared, weights: WeightSource, compute: Compute) -> Job: ...


def family_for(manifest: Manifest, directory: Path, task: str = "", schedule: str = "") -> Family:
    """The family that a prepared directory belongs to, configured from its manifest.

    Args:
        task, schedule: the deployment's defaults for a start without a request.
    Raises: ArtifactError: the manifest names a family that this version does not have.
    """
    family: Family = _find(_registered(manifest).family)(manifest, directory, task, schedule)
    return family


def likely_order(
    manifest: Manifest, body: Mapping[str, object] | None, task: str = "", schedule: str = ""
) -> str:
    """Key into the manifest's `orders` for a body that is not validated yet.

    Args:
        body: None: a start without a request. task, schedule: the deployment's defaults.
    Raises: ArtifactError: unknown family, or the defaults are needed and not prepared.
    """
    order: str = _find(_registered(manifest).likely_order)(manifest, body, task, schedule)
    return order


def _registered(manifest: Manifest) -> Registered:
    name = str(manifest.model["family"])
    if name not in REGISTRY:
        raise ArtifactError(
            "unknown model family",
            where="manifest.json: model.family",
            found=repr(name),
            expected=sorted(REGISTRY),
        )
    return REGISTRY[name]


def _find(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
