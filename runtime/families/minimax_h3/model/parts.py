"""The parts of a job on one rank, over the attention backends and operators of its device."""

from __future__ import annotations

from functools import partial

from runtime.compute import Compute
from runtime.families.minimax_h3.model.conditioner import encode_prompt
from runtime.families.minimax_h3.model.fused_block import FusedBlock
from runtime.families.minimax_h3.model.job import JobParts
from runtime.families.minimax_h3.model.refiner import refine_text
from runtime.families.minimax_h3.model.transformer import Transformer, block_forward
from runtime.ops.decoder import EAGER, DecoderOperators
from runtime.ops.fused_decoder import FusedDecoderOperators


def one_rank(compute: Compute) -> JobParts:
    """Fused blocks where operators are given, the eager composition elsewhere."""
    block = block_forward if compute.operators is None else FusedBlock(compute.operators)
    return JobParts(
        encode_prompt=partial(encode_prompt, attention=compute.short_attention),
        refine_text=partial(refine_text, attention=compute.short_attention),
        transformer=partial(Transformer, attention=compute.attention, block=block),
        decoder_operators=decoder_operators(compute),
    )


def decoder_operators(compute: Compute) -> DecoderOperators:
    """The video decoder's operators, the same on one rank and on several."""
    kernels = None if compute.operators is None else compute.operators.kernels
    return EAGER if kernels is None else FusedDecoderOperators(kernels)
