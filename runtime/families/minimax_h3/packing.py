"""One request as one sequence: which row is what, where it sits on the rotary axes, which modulation it takes.

Order of the S rows: text | keyframes | target audio | target video (diffusers 0.42.1, modular_pipelines/minimax_h3,
before_denoise). Positions (t, h, w) are float64 and equal to the reference in every bit; two details matter:
- the clock of the video frames is a sequential sum, the anchor of a last keyframe numpy's pairwise sum of the same
  spans; from 16 latent frames on they differ in the last bit;
- the spatial grid is numpy's `linspace(..., endpoint=False)`, start + i * step.

numpy only, imported on use; `patchify` and `unpatchify` take torch tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from loader.errors import InternalError
from runtime.families.minimax_h3.config import TAG_AUDIO, TAG_TEXT, TAG_VIDEO, H3Config

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

Anchor = Literal["first", "last"]

AUDIO_CHANNELS = 2
KIND_VIDEO, KIND_TEXT, KIND_AUDIO, KIND_KEYFRAME = 0, 1, 2, 3  # rows of the modulation table

_UNITS_PER_FRAME = 5.0 / 3.0  # 40 audio latents a second are the clock; 24 frames a second tick 5/3 of it
_FRAMES_PER_LATENT = (1, 4, 4, 4, 4)  # the VAE turns 17 frames into 5 latent frames
_SPATIAL_SCALE = 32


@dataclass(frozen=True)
class PackedSequence:
    """Layout of one request; S = num_text + num_condition + num_audio + num_video rows.

    Attributes:
        num_text: rows of the conditioner, image blocks included.
        num_condition: keyframe rows, keyframes one after the other.
        num_audio: target audio rows, all of the left channel, then all of the right.
        num_video: target video rows, frame-major, then row, then column.
        position_ids: float64 [S, 3], (t, h, w).
        token_tags: int64 [S]; 0 video, 1 text, 2 audio; image block rows of the text are 0.
        modulation_index: int32 [S]; 0 target video (and image block rows: tag 0 at the video timestep), 1 text,
            2 audio, 3 keyframe.
        latent_shape: (latent frames, latent height, latent width) of the target.
        num_audio_latents: target audio latents per channel.
    """

    num_text: int
    num_condition: int
    num_audio: int
    num_video: int
    position_ids: NDArray[np.float64]
    token_tags: NDArray[np.int64]
    modulation_index: NDArray[np.int32]
    latent_shape: tuple[int, int, int]
    num_audio_latents: int

    @property
    def num_rows(self) -> int:
        """S."""
        return self.num_text + self.num_condition + self.num_audio + self.num_video

    @property
    def text(self) -> slice:
        return slice(0, self.num_text)

    @property
    def condition(self) -> slice:
        return slice(self.num_text, self.num_text + self.num_condition)

    @property
    def audio(self) -> slice:
        start = self.num_text + self.num_condition
        return slice(start, start + self.num_audio)

    @property
    def video(self) -> slice:
        return slice(self.num_rows - self.num_video, self.num_rows)


def pack(
    config: H3Config,
    text_tags: Sequence[int],
    latent_shape: tuple[int, int, int],
    num_audio_latents: int,
    anchors: Sequence[Anchor] = (),
) -> PackedSequence:
    """Layout of a t2va or fl2va request.

    Args:
        text_tags: tag per conditioner row, `TokenStream.tags`.
        latent_shape: (latent frames, latent height, latent width) of the target; keyframes share height and width.
        num_audio_latents: per channel.
        anchors: where each keyframe is fixed, in packed order.

    Raises: InternalError: the latent canvas is not divisible by the transformer's patch, or an unknown anchor.
    """
    import numpy as np

    frames, height, width = latent_shape
    patch_t, patch_h, patch_w = config.transformer.patch_size
    if frames % patch_t or height % patch_h or width % patch_w:
        raise InternalError(
            "latents do not fill whole patches",
            where="latent_shape",
            found=latent_shape,
            expected=(patch_t, patch_h, patch_w),
        )
    num_text, rows_per_frame = len(text_tags), (height // patch_h) * (width // patch_w)
    num_condition = len(anchors) * rows_per_frame
    frame_grid, ends = _frame_grid(height, width, patch_h, patch_w)
    parts = [
        _rows(np.arange(num_text, dtype=np.float64), np.zeros((1, 2))),
        *(_rows(np.array([_anchor_time(anchor, num_text, frames)]), frame_grid) for anchor in anchors),
        *(
            _rows(num_text + np.arange(num_audio_latents, dtype=np.float64), np.array([[0.0, end]]))
            for end in ends
        ),
        _rows(_frame_times(frames, num_text), frame_grid),
    ]
    counts = (num_text, num_condition, AUDIO_CHANNELS * num_audio_latents, frames * rows_per_frame)
    tags, kinds = _tags_and_kinds(text_tags, counts)
    return PackedSequence(*counts, np.concatenate(parts), tags, kinds, latent_shape, num_audio_latents)


def patchify(latents: Tensor, patch_size: tuple[int, int, int]) -> Tensor:
    """[1, C, T, h, w] latents → [rows, C * patch volume], frame-major; a row is (channel, pt, ph, pw)."""
    pt, ph, pw = patch_size
    channels, frames, height, width = latents.shape[1:]
    cells = latents.reshape(channels, frames // pt, pt, height // ph, ph, width // pw, pw)
    return cells.permute(1, 3, 5, 0, 2, 4, 6).reshape(-1, channels * pt * ph * pw).contiguous()


def unpatchify(rows: Tensor, latent_shape: tuple[int, int, int], patch_size: tuple[int, int, int]) -> Tensor:
    """Inverse of `patchify`: [rows, C * patch volume] → [1, C, T, h, w]."""
    pt, ph, pw = patch_size
    frames, height, width = latent_shape
    channels = rows.shape[-1] // math.prod(patch_size)
    cells = rows.reshape(frames // pt, height // ph, width // pw, channels, pt, ph, pw)
    return cells.permute(3, 0, 4, 1, 5, 2, 6).reshape(1, channels, frames, height, width).contiguous()


def unpack_audio(rows: Tensor) -> Tensor:
    """[2 * T, C] audio rows, left channel first → [2, C, T] latents, contiguous."""
    return rows.reshape(AUDIO_CHANNELS, -1, rows.shape[-1]).permute(0, 2, 1).contiguous()


def pack_audio(latents: Tensor) -> Tensor:
    """[2, C, T] audio latents → [2 * T, C] rows, left channel first."""
    return latents.permute(0, 2, 1).reshape(-1, latents.shape[1])


def _rows(times: NDArray[np.float64], places: NDArray[np.float64]) -> NDArray[np.float64]:
    """Every time with every (h, w) place: [len(times) * len(places), 3], time outermost."""
    import numpy as np

    return np.concatenate(
        [np.repeat(times, len(places))[:, None], np.tile(places, (len(times), 1))], axis=1, dtype=np.float64
    )


def _frame_grid(
    height: int, width: int, patch_h: int, patch_w: int
) -> tuple[NDArray[np.float64], tuple[float, float]]:
    """(h, w) of one latent frame's rows, [rows, 2], and the first and last width coordinate (left, right audio)."""
    import numpy as np

    root_area = np.sqrt(height * width)
    axis_h, axis_w = _axis(height, patch_h, root_area), _axis(width, patch_w, root_area)
    grid = np.stack(np.meshgrid(axis_h, axis_w, indexing="ij"), axis=-1).reshape(-1, 2)
    return grid, (float(axis_w[0]), float(axis_w[-1]))


def _axis(size: int, patch: int, root_area: float) -> NDArray[np.float64]:
    """Coordinates of one axis: centred, length size / sqrt(area), so a square spans [0, 32)."""
    import numpy as np

    ratio = size / root_area
    left = (1.0 - ratio) / 2.0
    return np.linspace(left, left + ratio, size // patch, endpoint=False, dtype=np.float64) * _SPATIAL_SCALE


def _spans(frames: int) -> NDArray[np.float64]:
    """Length of every latent frame on the clock."""
    import numpy as np

    pattern = np.array(_FRAMES_PER_LATENT, dtype=np.float64)
    return np.resize(pattern, frames) * _UNITS_PER_FRAME


def _frame_times(frames: int, origin: int) -> NDArray[np.float64]:
    """Start of every latent frame, by sequential summation."""
    import numpy as np

    return origin + np.concatenate([[0.0], np.cumsum(_spans(frames)[:-1])])


def _anchor_time(anchor: str, origin: int, frames: int) -> float:
    """Clock of a keyframe. The pairwise sum of the last anchor is the reference's."""
    if anchor == "first":
        return float(origin)
    if anchor == "last":
        return float(origin) + float(_spans(frames).sum()) - _UNITS_PER_FRAME
    raise InternalError(
        "unknown keyframe anchor", where="anchors", found=repr(anchor), expected="first, last"
    )


def _tags_and_kinds(
    text_tags: Sequence[int], counts: tuple[int, int, int, int]
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Modality tag and modulation row kind of every row."""
    import numpy as np

    text = np.asarray(text_tags, dtype=np.int64)
    tags = np.concatenate([text, np.repeat([TAG_VIDEO, TAG_AUDIO, TAG_VIDEO], counts[1:])])
    kinds = np.concatenate(
        [
            np.where(text == TAG_TEXT, KIND_TEXT, KIND_VIDEO),
            np.repeat([KIND_KEYFRAME, KIND_AUDIO, KIND_VIDEO], counts[1:]),
        ]
    )
    return tags.astype(np.int64), kinds.astype(np.int32)
