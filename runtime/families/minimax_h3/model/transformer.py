"""The DiT: one evaluation of the velocity over the packed sequence [text | keyframe rows | audio | video].

Weights are asked for block by block, so the first evaluation runs behind the upload. Modulation comes from prepared
tables. The stages (`embed`, `block_forward` per block, `heads`) are separate so that another family, a cache or
sequence parallelism can reuse or replace one of them; nothing here knows about acceleration.

Callers run it under `torch.inference_mode()`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from loader.errors import InternalError
from runtime.families.minimax_h3.config import H3Config, TransformerConfig
from runtime.families.minimax_h3.model.adaln import (
    FINAL_AUDIO,
    FINAL_VIDEO,
    GATE_ATTN,
    GATE_MLP,
    SCALE_ATTN,
    SCALE_MLP,
    SHIFT_ATTN,
    SHIFT_MLP,
    ModulationTables,
)
from runtime.families.minimax_h3.model.block import (
    BlockWeights,
    SelfAttention,
    feed_forward,
    self_attention,
)
from runtime.families.minimax_h3.model.pending import Hidden, settled
from runtime.families.minimax_h3.model.rotary import packed_rotary_table
from runtime.families.minimax_h3.model.weight_views import take
from runtime.families.minimax_h3.packing import KIND_KEYFRAME, PackedSequence
from runtime.ops.attention import Attention, attention
from runtime.ops.linear import linear
from runtime.ops.norms import rms_norm
from runtime.ops.rotary import RotaryTable
from runtime.weights import WeightSource


class Velocity(NamedTuple):
    """Velocity of the target rows, fp32. video: [Nv, video_row_dim]. audio: [Na, audio_in_channels]."""

    video: Tensor
    audio: Tensor


@dataclass(frozen=True)
class SequenceState:
    """What stays the same over the evaluations of one request.

    rows: the part of the packed sequence that this transformer holds, of R rows; all S rows unless `begin` was told
    otherwise.
    """

    text: Tensor  # [N, D], refined
    index: Tensor  # [R] int32, row kind of each row in `rows`
    rope: RotaryTable  # [S, 3 * rope_freq_dim] each, dtype of `text`
    num_condition: int
    num_audio: int
    num_video: int
    rows: range

    def part(self, segment: Tensor, start: int) -> Tensor:
        """The rows of a segment, which begins at row `start` of the sequence, that lie in `rows`."""
        first, stop = (min(max(row - start, 0), len(segment)) for row in (self.rows.start, self.rows.stop))
        return segment[first:stop]


class BlockForward(Protocol):
    """The form of `block_forward`; a replacement may leave its last sum to the next block, see `pending`."""

    def __call__(
        self,
        x: Hidden,
        w: BlockWeights,
        modulation: Tensor,
        index: Tensor,
        rope: RotaryTable,
        attention: Attention,
        config: TransformerConfig,
    ) -> Hidden: ...


def block_forward(
    x: Hidden,
    w: BlockWeights,
    modulation: Tensor,
    index: Tensor,
    rope: RotaryTable,
    attention: Attention,
    config: TransformerConfig,
    attend: SelfAttention = self_attention,
) -> Tensor:
    """One block: modulated attention and modulated feed-forward, each added through a gate.

    Args:
        x: [S, D] packed rows.
        modulation: [R, 6, D], rows of this block and evaluation.
        index: [S] int32, row of `modulation`; out of range is undefined on CUDA.
        rope: in the dtype of `x`.
        attend: `self_attention` or a replacement of the same form.
    Returns: [S, D], new memory.
    Rounding: bf16 after 1 + scale, each product and each sum.
    Source: diffusers 0.42.1, transformer_minimax_h3.
    """

    def term(which: int) -> Tensor:
        return modulation[:, which].index_select(0, index)  # [S, D]

    x = settled(x)
    n = modulate(rms_norm(x, w.norm1, config.norm_eps), term(SCALE_ATTN), term(SHIFT_ATTN))
    x = x + term(GATE_ATTN) * attend(n, w, config, rope, attention)
    n = modulate(rms_norm(x, w.norm2, config.norm_eps), term(SCALE_MLP), term(SHIFT_MLP))
    return x + term(GATE_MLP) * feed_forward(n, w)


def modulate(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """`x * (1 + scale) + shift`, each operation rounding to the dtype of `x`. [S, D] -> [S, D]."""
    return x * (1.0 + scale) + shift


class Transformer:
    """One DiT over one weight source. `begin` once per request, then `forward` once per evaluation.

    attention: backend of every block. block: `block_forward` or a replacement of the same form.
    """

    def __init__(
        self,
        config: H3Config,
        weights: WeightSource,
        tables: ModulationTables,
        attention: Attention = attention,
        block: BlockForward = block_forward,
    ) -> None:
        self.config = config.transformer
        self.weights = weights
        self.tables = tables
        self.attention = attention
        self.block = block
        self.state: SequenceState | None = None

    def begin(self, text: Tensor, sequence: PackedSequence, rows: range | None = None) -> None:
        """Take the refined text and compute the request's constants on its device.

        Args:
            text: [N, D] from `refine_text`; its dtype is the dtype of the packed rows.
            sequence: position ids [S, 3] and modulation index [S], S = text + condition + audio + video rows.
            rows: contiguous part of the S rows to hold (None: all); its velocity is all that `forward` returns.
        Raises: InternalError: sizes disagree (names both).
        """
        num_rows = sequence.num_text + sequence.num_condition + sequence.num_audio + sequence.num_video
        _check_rows("text", len(text), sequence.num_text)
        _check_rows("position_ids", len(sequence.position_ids), num_rows)
        _check_rows("modulation_index", len(sequence.modulation_index), num_rows)
        positions = torch.tensor(sequence.position_ids, dtype=torch.float64).to(torch.float32)
        rows = range(num_rows) if rows is None else rows
        index = torch.tensor(sequence.modulation_index, dtype=torch.int32)
        self.state = SequenceState(
            text=text,
            index=index[rows.start : rows.stop].to(text.device),
            rope=packed_rotary_table(positions.to(text.device), self.config, text.dtype),
            num_condition=sequence.num_condition,
            num_audio=sequence.num_audio,
            num_video=sequence.num_video,
            rows=rows,
        )

    def forward(self, video_rows: Tensor, audio_rows: Tensor, evaluation: int) -> Velocity:
        """Velocity at one evaluation, of the target rows that are held.

        Args:
            video_rows: [Ncond + Nv, video_row_dim] fp32, keyframe rows first.
            audio_rows: [Na, audio_in_channels] fp32.
            evaluation: 0 … E-1; selects the modulation rows.
        Raises: InternalError: rows disagree with `begin`, or keyframe rows meet a table without them.
        """
        state = self._begun()
        x: Hidden = self.embed(video_rows, audio_rows)  # [R, D]
        modulation = self.tables.step(evaluation)
        if state.num_condition and modulation.blocks.shape[1] <= KIND_KEYFRAME:
            raise InternalError(
                "the modulation table has no keyframe rows",
                where=f"adaln/{self.tables.key}",
                found=f"{state.num_condition} keyframe rows",
            )
        for i in range(self.config.num_layers):
            w = BlockWeights.view(self.weights.tensors(f"transformer/blocks.{i}"), f"transformer_blocks.{i}.")
            x = self.block(x, w, modulation.blocks[i], state.index, state.rope, self.attention, self.config)
        return self.heads(settled(x), modulation.final)

    def embed(self, video_rows: Tensor, audio_rows: Tensor) -> Tensor:
        """Project the latent rows in fp32, round to the dtype of the text rows, and pack those held: [R, D]."""
        state = self._begun()
        _check_rows("video_rows", len(video_rows), state.num_condition + state.num_video)
        _check_rows("audio_rows", len(audio_rows), state.num_audio)
        prelude = self.weights.tensors("transformer/prelude")
        names = ("proj_in.weight", "proj_in.bias", "audio_proj_in.weight", "audio_proj_in.bias")
        video_weight, video_bias, audio_weight, audio_bias = take(prelude, "", names)
        condition_start, targets_start = len(state.text), len(state.text) + state.num_condition
        condition = state.part(video_rows[: state.num_condition], condition_start)
        audio_rows = state.part(audio_rows, targets_start)
        target = state.part(video_rows[state.num_condition :], targets_start + state.num_audio)
        video = linear(torch.cat((condition, target)), video_weight, video_bias).to(state.text.dtype)
        audio = linear(audio_rows, audio_weight, audio_bias).to(state.text.dtype)
        return torch.cat((state.part(state.text, 0), video[: len(condition)], audio, video[len(condition) :]))

    def heads(self, x: Tensor, final: Tensor) -> Velocity:
        """Norm, final modulation and fp32 head of the target rows only.

        Args:
            x: [R, D], the rows that are held. final: [2, 2, D], (video, audio) x (shift, scale).
        """
        state, eps = self._begun(), self.config.final_norm_eps
        heads = self.weights.tensors("transformer/heads")
        (norm,) = take(heads, "", ("norm_out.norm.weight",))

        def head(rows: Tensor, stream: int, name: str) -> Tensor:
            weight, bias = take(heads, name, (".weight", ".bias"))
            shift, scale = final[stream].unbind()
            return linear(modulate(rms_norm(rows, norm, eps), scale, shift), weight, bias)

        targets_start = len(state.text) + state.num_condition
        audio_start, video_start = (
            min(max(row - state.rows.start, 0), len(x))
            for row in (targets_start, targets_start + state.num_audio)
        )
        audio, video = x[audio_start:video_start], x[video_start:]
        return Velocity(head(video, FINAL_VIDEO, "proj_out"), head(audio, FINAL_AUDIO, "audio_proj_out"))

    def _begun(self) -> SequenceState:
        if self.state is None:
            raise InternalError("no request has begun", where="Transformer.forward", hint="call begin first")
        return self.state


def _check_rows(what: str, found: int, expected: int) -> None:
    if found != expected:
        raise InternalError(
            "number of rows disagrees with the sequence", where=what, found=found, expected=expected
        )
