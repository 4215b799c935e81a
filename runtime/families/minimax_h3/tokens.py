"""Prompt and keyframes → the token stream of the Qwen3-VL conditioner.

There is no chat template and no begin or end token: the stream is the prompt as typed, preceded for every keyframe by
`<Picture i>: `, `<|vision_start|>`, one `<|image_pad|>` per merged patch and `<|vision_end|>` (diffusers 0.42.1,
modular_pipelines/minimax_h3/encoders). The pieces are tokenized one by one; joined first, merges would differ.

Special tokens typed in a prompt:
- the seven H3 markers (`<d>`, `</d>`, `<|cutoff|>`, lyrics and caption markers) and the chat tokens
  (`<|im_start|>`, `<|im_end|>`, `<|endoftext|>`) become their one id, as in the reference;
- the four vision tokens (`<|vision_start|>`, `<|vision_end|>`, `<|image_pad|>`, `<|video_pad|>`) stay ordinary text:
  an image block comes from a keyframe, never from the prompt.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loader.errors import ArtifactError, RequestError
from runtime.families.minimax_h3.config import TAG_TEXT, TAG_VIDEO, H3Config

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_TEXT_ROWS = 16_384
H3_MARKERS = (
    "<d>", "</d>", "<|cutoff|>", "<|lyrics_start|>", "<|lyrics_end|>", "<|caption_start|>", "<|caption_end|>",
)  # fmt: skip
_MAX_ASPECT_RATIO = 200  # refused by the reference's resize rule


@dataclass(frozen=True)
class ImageSpan:
    """One image block: `start` is the row of its first `<|image_pad|>`, `grid_h` x `grid_w` its unmerged patches.

    The block has grid_h * grid_w / merge² pad rows; the delimiters are the rows before and after them.
    """

    start: int
    grid_h: int
    grid_w: int


@dataclass(frozen=True)
class TokenStream:
    """Rows of the conditioner, N of them: `ids`, their modality `tags` (1 text, 0 image block) and the image blocks."""

    ids: tuple[int, ...]
    tags: tuple[int, ...]
    images: tuple[ImageSpan, ...]


def build_token_stream(
    config: H3Config,
    tokenizer: Tokenizer,
    prompt: str,
    keyframe_sizes: Sequence[tuple[int, int]] = (),
    *,
    max_rows: int = MAX_TEXT_ROWS,
) -> TokenStream:
    """Tokens of one request.

    Args:
        tokenizer: loaded from the prepared directory's self-contained `tokenizer.json`.
        prompt: encoded verbatim, without strip or case change.
        keyframe_sizes: (width, height) of the prepared keyframes, first before last.
        max_rows: admission limit; nothing is ever cut.

    Raises:
        RequestError: the stream is longer than `max_rows` (names both counts), or empty.
        ArtifactError: the tokenizer lacks one of the seven H3 markers or disagrees with the configuration.
    """
    check_tokenizer(config, tokenizer)
    ids: list[int] = []
    tags: list[int] = []
    images: list[ImageSpan] = []
    for number, (width, height) in enumerate(keyframe_sizes, start=1):
        label = _encode(tokenizer, f"<Picture {number}>: ")
        grid_h, grid_w, pads = _image_grid(config, width, height)
        images.append(ImageSpan(len(ids) + len(label) + 1, grid_h, grid_w))
        block = [
            config.tokens.vision_start_token_id,
            *[config.tokens.image_token_id] * pads,
            config.tokens.vision_end_token_id,
        ]
        ids += label + block
        tags += [TAG_TEXT] * len(label) + [TAG_VIDEO] * len(block)
    prompt_ids = encode_prompt_text(config, tokenizer, prompt)
    ids += prompt_ids
    tags += [TAG_TEXT] * len(prompt_ids)
    if not prompt_ids:
        raise RequestError("the prompt has no tokens", where="prompt", expected="text")
    if len(ids) > max_rows:
        raise RequestError(
            "the prompt is too long",
            where="prompt",
            found=f"{len(ids)} token rows ({len(prompt_ids)} of the prompt)",
            expected=f"at most {max_rows} token rows",
            hint="shorten the prompt; nothing is cut silently",
        )
    return TokenStream(tuple(ids), tuple(tags), tuple(images))


def encode_prompt_text(config: H3Config, tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of prompt text in which vision tokens are ordinary characters.

    A vision token is cut behind its `<|` and the pieces are encoded apart. The Qwen pre-tokenizer cuts there as well,
    so the ids are those of the same text in a vocabulary without the token.
    """
    literals = [literal for token in _vision_ids(config) if (literal := tokenizer.id_to_token(token))]
    forged = re.compile("|".join(f"{re.escape(text[:2])}(?={re.escape(text[2:])})" for text in literals))
    ids: list[int] = []
    start = 0
    for match in forged.finditer(text):
        ids += _encode(tokenizer, text[start : match.end()])
        start = match.end()
    return ids + _encode(tokenizer, text[start:])


def check_tokenizer(config: H3Config, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer that would change the conditioning without an error.

    Raises: ArtifactError: a marker of H3 is not one id inside the embedding, or a vision token has no entry.
    """
    marker_ids = {marker: tokenizer.token_to_id(marker) for marker in H3_MARKERS}
    missing = [marker for marker, token in marker_ids.items() if token is None]
    if missing:
        raise ArtifactError(
            "the tokenizer lacks H3 tokens",
            where="tokenizer.json",
            found=f"no {', '.join(missing)}",
            expected="all seven as added tokens",
            hint="prepare the directory again; stock Qwen3-VL files do not have them",
        )
    unknown = [token for token in _vision_ids(config) if tokenizer.id_to_token(token) is None]
    outside = [
        marker
        for marker, token in marker_ids.items()
        if token is not None and token >= config.text.vocab_size
    ]
    if unknown or outside:
        raise ArtifactError(
            "the tokenizer does not belong to this text encoder",
            where="tokenizer.json",
            found=f"vision ids without a token: {unknown}; H3 tokens outside the embedding: {outside}",
            expected=f"ids of config.tokens, all below {config.text.vocab_size}",
        )


def resized_size(width: int, height: int, config: H3Config) -> tuple[int, int]:
    """(height, width) at which the conditioner sees a picture of `width` x `height` pixels.

    Both sides become multiples of patch * merge, nearest first (half to even); then the area is brought into the
    processor's limits, down with floor and up with ceil (transformers 5.24, image_processing_pil_qwen2_vl).

    Raises: RequestError: the longer side is more than 200 times the shorter.
    """
    if max(width, height) > _MAX_ASPECT_RATIO * min(width, height):
        raise RequestError(
            "a keyframe is too elongated",
            where="first_frame or last_frame",
            found=f"{width}x{height}",
            expected=f"at most {_MAX_ASPECT_RATIO}:1",
        )
    factor = config.vision.patch_size * config.vision.spatial_merge_size
    limits = config.image_processor
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > limits.max_pixels:
        shrink = math.sqrt((height * width) / limits.max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < limits.min_pixels:
        grow = math.sqrt(limits.min_pixels / (height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


def _image_grid(config: H3Config, width: int, height: int) -> tuple[int, int, int]:
    """Patch rows, patch columns and pad tokens of a keyframe."""
    patch, merge = config.vision.patch_size, config.vision.spatial_merge_size
    new_height, new_width = resized_size(width, height, config)
    grid_h, grid_w = new_height // patch, new_width // patch
    return grid_h, grid_w, grid_h * grid_w // merge**2


def _vision_ids(config: H3Config) -> tuple[int, int, int, int]:
    tokens = config.tokens
    return (
        tokens.vision_start_token_id,
        tokens.vision_end_token_id,
        tokens.image_token_id,
        tokens.video_token_id,
    )


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids) if text else []
