"""Step schedules: two sigma ladders (video, audio) that share one index, as exact float32 values.

What is unusual here: every value is a Python float that holds a float32 exactly, computed without torch or numpy, so
that prepare, the request check and the loop compare schedules by bit pattern. All float32 operations are done in
float64 and rounded once; for + - * / that equals the float32 operation (float64 has more than twice its digits).

Convention (diffusers 0.42.1, scheduling_minimax_h3): sigma 1 is noise and 0 is clean, timestep = 1 - sigma in float32,
N sigmas drive N - 1 model evaluations, and the last sigma is exactly 0. Standard library only.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from loader.errors import ArtifactError, RequestError

VIDEO_SHIFT, AUDIO_SHIFT = 12.0, 3.0
DEFAULT_SCHEDULE = "base-49"
MAX_EVALUATIONS = 1000
FASTH3_STEPS = (999, 874, 749, 624, 500, 375, 250, 125)  # thousandths of the unshifted grid
FASTH3_VIDEO_SHIFT = 10.0


def round_float32(value: float) -> float:
    """Nearest float32 (half to even) of `value`, as a Python float."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def float32_bits(value: float) -> str:
    """Bit pattern of a float32 value as eight lower-case hex digits: 1.0 → "3f800000"."""
    return struct.pack(">f", value).hex()


def float32_from_bits(bits: str) -> float:
    """Inverse of `float32_bits`.

    Raises: ArtifactError: not eight hex digits.
    """
    if not re.fullmatch(r"[0-9a-f]{8}", bits):
        raise ArtifactError(
            "not a float32 bit pattern", found=repr(bits), expected="eight lower-case hex digits"
        )
    return float(struct.unpack(">f", bytes.fromhex(bits))[0])


@dataclass(frozen=True)
class Schedule:
    """One named trajectory.

    `video_sigmas` and `audio_sigmas` have evaluations + 1 float32 values each, strictly decreasing from at most 1 to
    exactly 0. Raises: ArtifactError: they do not (names the schedule, the ladder and the position).
    """

    name: str
    video_sigmas: tuple[float, ...]
    audio_sigmas: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_ladder(self.name, "video_sigmas", self.video_sigmas)
        _check_ladder(self.name, "audio_sigmas", self.audio_sigmas)
        if len(self.video_sigmas) != len(self.audio_sigmas):
            raise ArtifactError(
                "the two ladders differ in length",
                where=f"schedule {self.name}",
                found=f"{len(self.video_sigmas)} video and {len(self.audio_sigmas)} audio sigmas",
                expected="one index for both",
            )

    @property
    def evaluations(self) -> int:
        """Model evaluations: one fewer than the grid points."""
        return len(self.video_sigmas) - 1

    @property
    def video_timesteps(self) -> tuple[float, ...]:
        """float32 `1 - sigma` of each evaluation; 0 is noise."""
        return tuple(round_float32(1.0 - sigma) for sigma in self.video_sigmas[:-1])

    @property
    def audio_timesteps(self) -> tuple[float, ...]:
        """float32 `1 - sigma` of each evaluation; 0 is noise."""
        return tuple(round_float32(1.0 - sigma) for sigma in self.audio_sigmas[:-1])

    @property
    def video_bits(self) -> tuple[str, ...]:
        """The video ladder as float32 bit patterns, the form of the manifest."""
        return tuple(float32_bits(sigma) for sigma in self.video_sigmas)

    @property
    def audio_bits(self) -> tuple[str, ...]:
        """The audio ladder as float32 bit patterns, the form of the manifest."""
        return tuple(float32_bits(sigma) for sigma in self.audio_sigmas)

    def same_trajectory(self, other: Schedule) -> bool:
        """Whether both schedules have the same bits, whatever their names."""
        return (self.video_bits, self.audio_bits) == (other.video_bits, other.audio_bits)

    def condition_timestep(self, evaluation: int, level: float) -> float:
        """Timestep of keyframe rows: float32 `level`, or the video timestep once that is beyond it."""
        return max(self.video_timesteps[evaluation], round_float32(level))

    def plan(self, evaluation: int, condition_level: float | None = None) -> tuple[float, ...]:
        """Distinct timesteps of one evaluation, ascending; with `condition_level`, that of keyframe rows too."""
        steps = {self.video_timesteps[evaluation], self.audio_timesteps[evaluation]}
        if condition_level is not None:
            steps.add(self.condition_timestep(evaluation, condition_level))
        return tuple(sorted(steps))


def named_schedule(name: str) -> Schedule:
    """A schedule that its name defines: `base-<E>` (E evaluations, shifts 12 and 3) or `fasth3-8` (shifts 10 and 3).

    Raises: RequestError: another name, or E outside 1 … 1000.
    """
    if name == "fasth3-8":
        grid = [round_float32(step / 1000) for step in FASTH3_STEPS] + [0.0]
        return Schedule(name, shifted_grid(grid, FASTH3_VIDEO_SHIFT), shifted_grid(grid, AUDIO_SHIFT))
    match = re.fullmatch(r"base-([1-9][0-9]{0,3})", name, re.ASCII)
    if match is None or int(match[1]) > MAX_EVALUATIONS:
        raise RequestError(
            "unknown step schedule",
            where="schedule",
            found=repr(name),
            expected=f"base-1 … base-{MAX_EVALUATIONS}, fasth3-8",
        )
    grid = linear_grid(int(match[1]) + 1)
    return Schedule(name, shifted_grid(grid, VIDEO_SHIFT), shifted_grid(grid, AUDIO_SHIFT))


def explicit_schedule(name: str, video_sigmas: Iterable[float], audio_sigmas: Iterable[float]) -> Schedule:
    """A schedule from its sigmas, rounded to float32 and otherwise used as they are (no shift).

    Raises: ArtifactError: fewer than two values, not strictly decreasing in float32, or not ending at 0.
    """
    return Schedule(name, _rounded(name, video_sigmas), _rounded(name, audio_sigmas))


def schedule_from_bits(name: str, video_bits: Iterable[str], audio_bits: Iterable[str]) -> Schedule:
    """A schedule from the float32 bit patterns of a manifest. Raises: ArtifactError."""
    return Schedule(
        name, tuple(map(float32_from_bits, video_bits)), tuple(map(float32_from_bits, audio_bits))
    )


def linear_grid(points: int) -> list[float]:
    """`points` float32 values from 1 down to 0, equal in every bit to torch's float32 linspace on the CPU.

    torch walks from both ends with one float32 step and a fused multiply-add; the upper half therefore is not
    `1 + i * step`.
    """
    step = round_float32(-1.0 / (points - 1))
    half = points // 2
    front = [round_float32(1.0 + step * i) for i in range(half)]
    return front + [round_float32(0.0 - step * (points - 1 - i)) for i in range(half, points)]


def shifted_grid(grid: Sequence[float], shift: float) -> tuple[float, ...]:
    """`shift * b / (1 + (shift - 1) * b)` per float32 grid value, every operation rounded to float32."""
    factor, slope = round_float32(shift), round_float32(shift - 1.0)
    sigmas = []
    for b in grid:
        denominator = round_float32(1.0 + round_float32(slope * b))
        sigmas.append(round_float32(round_float32(factor * b) / denominator))
    return tuple(sigmas)


def _rounded(name: str, sigmas: Iterable[float]) -> tuple[float, ...]:
    try:
        return tuple(round_float32(float(sigma)) for sigma in sigmas)
    except (TypeError, ValueError, OverflowError) as error:
        raise ArtifactError(
            "sigmas are not float32 numbers", where=f"schedule {name}", found=error
        ) from error


def _check_ladder(name: str, ladder: str, sigmas: Sequence[float]) -> None:
    where = f"schedule {name}: {ladder}"
    if len(sigmas) < 2:
        raise ArtifactError("too few values", where=where, found=len(sigmas), expected="at least 2")
    if not 0.0 < sigmas[0] <= 1.0 or sigmas[0] != round_float32(sigmas[0]) or sigmas[-1] != 0.0:
        ends = f"{sigmas[0]} … {sigmas[-1]}"
        raise ArtifactError(
            "wrong end points", where=where, found=ends, expected="first a float32 in (0, 1], last 0"
        )
    for index, (sigma, following) in enumerate(pairwise(sigmas)):
        if not following < sigma or following != round_float32(following):
            raise ArtifactError(
                f"value {index + 1} does not continue the ladder",
                where=where,
                found=f"{sigma!r} then {following!r}",
                expected="strictly decreasing float32 values",
            )
