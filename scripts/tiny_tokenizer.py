"""A small byte-level BPE tokenizer with the published file layout of MiniMax-H3's.

As in the release, `tokenizer.json` knows the Qwen special tokens but not the seven H3 markers: those stand only in
`additional_special_tokens` of `tokenizer_config.json` and take the ids that follow, in list order.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

QWEN_SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
QWEN_PLAIN_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
H3_MARKERS = (
    "<d>",
    "</d>",
    "<|cutoff|>",
    "<|lyrics_start|>",
    "<|lyrics_end|>",
    "<|caption_start|>",
    "<|caption_end|>",
)
# Word boundaries of the Qwen2 tokenizer.
_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CORPUS = """
a robot is dancing in the rain on a neon street while the camera slowly moves around it and the music plays softly
the woman with a red umbrella walks through the old city at night and says hello to the man in the window
wide shot of a mountain lake at sunrise with birds singing and the wind in the trees then a close up of the water
the dog runs along the beach after the ball while waves roll in and children are laughing in the background
a car drives past an empty station and its lights shine on the wet road as thunder sounds from far away
slow motion of coffee pouring into a white cup with steam rising in warm morning light in a quiet kitchen
an astronaut floats above the earth and hums a song while stars turn behind her and the radio is speaking
the singer steps to the microphone and the crowd is cheering as the first notes of the guitar are heard
"""


def special_token_ids(num_base: int) -> dict[str, int]:
    """Ids of the tokens that `tokenizer.json` adds after its base vocabulary."""
    return {token: num_base + i for i, token in enumerate(QWEN_SPECIAL_TOKENS + QWEN_PLAIN_TOKENS)}


def learn_merges(num_merges: int) -> list[tuple[str, str]]:
    """Greedy byte-pair merges of a few sentences; ties go to the pair that sorts first. At most as many as exist."""
    words = [["Ġ", *word] for word in _CORPUS.split()]
    merges: list[tuple[str, str]] = []
    while len(merges) < num_merges:
        counts = Counter(pair for word in words for pair in pairwise(word))
        if not counts:
            break
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        merges.append(best)
        words = [_apply(word, best) for word in words]
    return merges


def _apply(word: list[str], pair: tuple[str, str]) -> list[str]:
    result: list[str] = []
    for piece in word:
        if result and (result[-1], piece) == pair:
            result[-1] += piece
        else:
            result.append(piece)
    return result


def write_tokenizer(directory: Path, num_base: int) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json`, `vocab.json` and `merges.txt`.

    num_base: tokens before the first special one: 256 bytes, then merges, then names that no text reaches.
    """
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
    )

    merges = learn_merges(num_base - 256)
    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    vocab |= {f"<unreachable {i}>": i for i in range(len(vocab), num_base)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.ByteLevel(
        add_prefix_space=False, trim_offsets=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in QWEN_SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in QWEN_PLAIN_TOKENS])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    merge_lines = "".join(f"{left} {right}\n" for left, right in merges)
    (directory / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    (directory / "merges.txt").write_text(f"#version: 0.2\n{merge_lines}", encoding="utf-8")
    _write_config(directory, len(vocab))


def _write_config(directory: Path, num_base: int) -> None:
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(number): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": token in QWEN_SPECIAL_TOKENS,
            }
            for token, number in special_token_ids(num_base).items()
        },
        "additional_special_tokens": [*QWEN_SPECIAL_TOKENS[1:], *H3_MARKERS],
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 262144,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
