"""The inference contract of a distilled release (`fastvideo_inference.json`), and step shifts of any release.

Step ladder and sigma shifts belong to a checkpoint. Where it states them twice, both statements must agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from loader.errors import ArtifactError
from prepare.checkpoint import read_json
from runtime.schedules import AUDIO_SHIFT, FASTH3_STEPS, FASTH3_VIDEO_SHIFT

CONTRACT_NAME = "fastvideo_inference.json"
CONTRACT_SCHEMA = "fasth3-inference-contract-v1"
SPARSE_BACKEND, SPARSITY, TILE_ROWS = "VIDEO_SPARSE_ATTN_H3", 0.8, 64
SCHEDULER_CONFIGS = {
    "video": "scheduler/scheduler_config.json",
    "audio": "audio_scheduler/scheduler_config.json",
}


@dataclass(frozen=True)
class InferenceContract:
    """What a distilled checkpoint must be run with. `steps`: thousandths of the unshifted grid, descending.

    sparsity, tile: of its sparse attention, see `SPARSE_BACKEND`.
    """

    steps: tuple[int, ...]
    video_shift: float
    audio_shift: float
    schedule: str
    sparsity: float
    tile: int


def read_contract(root: Path, *, is_distilled: bool) -> InferenceContract | None:
    """Read and cross-check the contract of a Diffusers-layout tree.

    Args:
        is_distilled: the model is declared to be distilled, so the contract must be there.
    Returns: None: no contract, and none needed.
    Raises: ArtifactError: missing although needed, unknown schema, a ladder that contradicts itself or is not one this
    version knows, or shifts that differ from the scheduler configurations.
    """
    if not (root / CONTRACT_NAME).is_file():
        if is_distilled:
            raise ArtifactError(
                "a distilled checkpoint needs its inference contract",
                where=CONTRACT_NAME,
                hint="download it; a uniform step grid would give other videos",
            )
        return None
    table = read_json(root / CONTRACT_NAME, CONTRACT_NAME)
    _expect(table, "schema_version", CONTRACT_SCHEMA)
    steps = _read_steps(table)
    _expect(table, "video_scheduler_shift", FASTH3_VIDEO_SHIFT)
    _expect(table, "audio_scheduler_shift", AUDIO_SHIFT)
    _expect(table, "guidance_scale", 1.0)
    _expect(table, "task", "t2av")
    _expect(table, "attention_backend", SPARSE_BACKEND)
    _expect(table, "vsa_sparsity", SPARSITY)
    _expect(table, "vsa_tile_size", TILE_ROWS)
    check_scheduler_shifts(root, FASTH3_VIDEO_SHIFT, AUDIO_SHIFT, stated_by=CONTRACT_NAME)
    return InferenceContract(
        steps,
        FASTH3_VIDEO_SHIFT,
        AUDIO_SHIFT,
        schedule=f"fasth3-{len(steps)}",
        sparsity=SPARSITY,
        tile=TILE_ROWS,
    )


def check_scheduler_shifts(root: Path, video: float, audio: float, *, stated_by: str) -> None:
    """Compare both scheduler configurations with `video` and `audio`. Raises: ArtifactError: missing or different."""
    for stream, shift in (("video", video), ("audio", audio)):
        path = SCHEDULER_CONFIGS[stream]
        found = read_json(root / path, path).get("shift")
        check_shift(found, shift, f"{path}: shift", stated_by)


def check_shift(found: object, expected: float, where: str, stated_by: str) -> None:
    """Raises: ArtifactError: `found` is not the number `expected`."""
    if isinstance(found, bool) or not isinstance(found, int | float) or found != expected:
        raise ArtifactError(
            f"{stated_by} has another shift", where=where, found=repr(found), expected=expected
        )


def _read_steps(table: dict[str, object]) -> tuple[int, ...]:
    where = f"{CONTRACT_NAME}: dmd_denoising_steps"
    steps, forwards = table.get("dmd_denoising_steps"), table.get("transformer_forwards")
    if not isinstance(steps, list) or not all(type(step) is int for step in steps):
        raise ArtifactError("not a list of integers", where=where, found=repr(steps))
    if forwards != len(steps):
        raise ArtifactError(
            "ladder and transformer_forwards disagree",
            where=where,
            found=f"{len(steps)} steps, transformer_forwards {forwards!r}",
        )
    if tuple(steps) != FASTH3_STEPS:
        raise ArtifactError(
            "not a step ladder that this version knows",
            where=where,
            found=steps,
            expected=f"{list(FASTH3_STEPS)}, in descending order",
        )
    return tuple(steps)


def _expect(table: dict[str, object], key: str, expected: object) -> None:
    found = table.get(key)
    if found != expected or isinstance(found, bool):
        raise ArtifactError(
            "not a value that this version knows",
            where=f"{CONTRACT_NAME}: {key}",
            found=repr(found),
            expected=expected,
        )
