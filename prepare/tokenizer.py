"""One self-contained `tokenizer.json` with the markers that the release configures elsewhere.

The seven MiniMax-H3 markers stand only in `additional_special_tokens` of `tokenizer_config.json` and take the ids after
the last one of `tokenizer.json`, in list order. A tokenizer without them cuts dialogue into byte pairs, silently.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

from loader.errors import ArtifactError
from prepare.checkpoint import read_json

# In id order; 151669 … 151675 in the release.
MARKERS = (
    "<d>",
    "</d>",
    "<|cutoff|>",
    "<|lyrics_start|>",
    "<|lyrics_end|>",
    "<|caption_start|>",
    "<|caption_end|>",
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def marker_ids(config: Mapping[str, object], known: Container[str], next_id: int) -> dict[str, int]:
    """Ids of the markers: the configured tokens that `known` lacks, numbered from `next_id` in list order.

    Args:
        config: `tokenizer_config.json`.
        known: tokens that `tokenizer.json` has.
        next_id: first id after those.
    Raises: ArtifactError: the list is missing, or its new tokens are not exactly the seven markers in their order.
    """
    where = "tokenizer_config.json: additional_special_tokens"
    listed = config.get("additional_special_tokens")
    if not isinstance(listed, list):
        raise ArtifactError(
            "not a list", where=where, found=type(listed).__name__, expected=", ".join(MARKERS)
        )
    tokens = [_content(item, where) for item in listed]
    missing = [marker for marker in MARKERS if marker not in tokens and marker not in known]
    if missing:
        raise ArtifactError("H3 marker tokens are missing", where=where, found=f"no {', '.join(missing)}")
    added = [token for token in dict.fromkeys(tokens) if token not in known]
    expected = [marker for marker in MARKERS if marker not in known]
    if added != expected:
        raise ArtifactError(
            f"new tokens would not get the ids {next_id} … {next_id + len(MARKERS) - 1} in their order",
            where=where,
            found=", ".join(added),
            expected=", ".join(expected),
        )
    return {token: next_id + i for i, token in enumerate(added)}


def build_tokenizer(folder: Path) -> tuple[bytes, dict[str, int]]:
    """The prepared `tokenizer.json` and the ids of its special tokens.

    Returns: bytes that are a function of the two published files alone; token -> id of every added token.
    Raises: ArtifactError: unreadable, or markers missing, out of order, or not one token each in the result.
    """
    table = read_json(folder / "tokenizer.json", "tokenizer/tokenizer.json")
    config = read_json(folder / "tokenizer_config.json", "tokenizer/tokenizer_config.json")
    vocab, added = _vocabulary(table)
    known = {**vocab, **{str(item["content"]): int(str(item["id"])) for item in added}}
    new = marker_ids(config, known, max(known.values()) + 1)
    entries = [*added, *(_added_token(token, number) for token, number in new.items())]
    data = json.dumps({**table, "added_tokens": entries}, ensure_ascii=False, separators=(",", ":")).encode()
    ids = {str(item["content"]): int(str(item["id"])) for item in entries}
    check_tokenizer(data, "tokenizer/tokenizer.json")
    return data, ids


def check_tokenizer(data: bytes, where: str) -> None:
    """Load a prepared tokenizer and encode every marker.

    Raises: ArtifactError: not loadable, or the markers are not single tokens with consecutive ids in their order.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(data.decode("utf-8"))
    # The library raises bare Exception for any text it cannot parse.
    except Exception as error:
        raise ArtifactError(f"cannot be loaded ({error})", where=where) from error
    encoded = [tokenizer.encode(marker, add_special_tokens=False).ids for marker in MARKERS]
    first = tokenizer.token_to_id(MARKERS[0])
    expected = [[first + i] for i in range(len(MARKERS))] if first is not None else None
    if encoded != expected:
        raise ArtifactError(
            "marker tokens are not consecutive single ids in their order",
            where=where,
            found=dict(zip(MARKERS, encoded, strict=True)),
        )


def check_vision_ids(ids: Mapping[str, int], config_ids: Mapping[str, int], vocab_size: int) -> None:
    """Compare the vision markers of tokenizer and text encoder. Raises: ArtifactError: different or out of range."""
    pairs = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    wrong = [
        f"{token} is {ids.get(token)}, {key} is {config_ids[key]}"
        for key, token in pairs.items()
        if ids.get(token) != config_ids[key]
    ]
    if wrong:
        raise ArtifactError(
            "tokenizer and text encoder disagree", where="text_encoder/config.json", found="; ".join(wrong)
        )
    if max(ids.values()) >= vocab_size:
        raise ArtifactError(
            "tokens beyond the embedding table",
            where="tokenizer",
            found=max(ids.values()),
            expected=f"below {vocab_size}",
        )


def _vocabulary(table: Mapping[str, object]) -> tuple[dict[str, int], Sequence[dict[str, object]]]:
    model, added = table.get("model"), table.get("added_tokens", [])
    vocab = model.get("vocab") if isinstance(model, dict) else None
    is_sound = (
        isinstance(vocab, dict)
        and vocab
        and all(type(number) is int for number in vocab.values())
        and isinstance(added, list)
        and all(
            isinstance(item, dict) and type(item.get("id")) is int and "content" in item for item in added
        )
    )
    if not is_sound:
        raise ArtifactError("no byte-pair vocabulary with added tokens", where="tokenizer/tokenizer.json")
    assert isinstance(vocab, dict)
    assert isinstance(added, list)
    return vocab, added


def _content(item: object, where: str) -> str:
    content = item.get("content") if isinstance(item, dict) else item
    if not isinstance(content, str):
        raise ArtifactError("not a token", where=where, found=repr(item))
    return content


def _added_token(token: str, number: int) -> dict[str, object]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": number, "content": token, **flags}
