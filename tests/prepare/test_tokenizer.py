"""The prepared tokenizer is self-contained and gives transformers' ids."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from loader.errors import ArtifactError
from prepare.tokenizer import MARKERS, build_tokenizer, check_tokenizer, check_vision_ids, marker_ids
from tests.prepare.cases import CASES, case_path, says

QWEN = frozenset({"<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"})
PROMPTS = (
    "a robot dancing",
    "She says <d>[English] hello there</d> and <|lyrics_start|>la la<|lyrics_end|>",
    "<|caption_start|>wide shot<|caption_end|><|cutoff|>",
    "<Picture 1>: <|vision_start|><|image_pad|><|vision_end|> naïve 北京 🙂\n\n  tabs\tand 12345",
    "<d></d>< d><d",
)


def _config(case_id: str) -> dict[str, Any]:
    table: dict[str, Any] = json.loads(
        (case_path(case_id) / "tokenizer" / "tokenizer_config.json").read_text()
    )
    return table


@pytest.mark.parametrize("case_id", ["T26"])
def test_markers_take_the_ids_after_the_vocabulary(case_id: str) -> None:
    assert marker_ids(_config(case_id), QWEN, 151_669) == CASES[case_id]["expect"]["ids"]


@pytest.mark.parametrize("case_id", ["T24", "T25"])
def test_missing_or_reordered_markers_are_refused(case_id: str) -> None:
    with pytest.raises(ArtifactError) as refused:
        marker_ids(_config(case_id), QWEN, 151_669)
    assert says(case_id, str(refused.value))


def test_every_missing_marker_is_named() -> None:
    with pytest.raises(ArtifactError) as refused:
        marker_ids(_config("T24"), QWEN, 151_669)
    assert all(marker in str(refused.value) for marker in MARKERS)


def test_foreign_token_before_the_markers_is_refused() -> None:
    config = {"additional_special_tokens": ["<new>", *MARKERS]}
    with pytest.raises(ArtifactError, match="<new>"):
        marker_ids(config, frozenset(), 10)


@pytest.mark.oracle
@pytest.mark.parametrize("prompt", PROMPTS)
def test_ids_equal_those_of_transformers(prompt: str, diffusers_checkpoint: Path) -> None:
    from transformers import AutoTokenizer

    data, _ = build_tokenizer(diffusers_checkpoint / "tokenizer")
    oracle = AutoTokenizer.from_pretrained(diffusers_checkpoint / "tokenizer")
    ours = Tokenizer.from_str(data.decode()).encode(prompt, add_special_tokens=False).ids
    assert ours == oracle(prompt, add_special_tokens=False)["input_ids"]


def test_dialogue_marker_is_one_token(diffusers_checkpoint: Path) -> None:
    data, ids = build_tokenizer(diffusers_checkpoint / "tokenizer")
    base = 256 + 40 + 26
    assert Tokenizer.from_str(data.decode()).encode("<d>", add_special_tokens=False).ids == [base]
    assert [ids[marker] for marker in MARKERS] == list(range(base, base + 7))


def _broken(tmp_path: Path, checkpoint: Path, file: str, content: str) -> Path:
    folder = Path(shutil.copytree(checkpoint / "tokenizer", tmp_path / "tokenizer"))
    (folder / file).write_text(content)
    return folder


@pytest.mark.parametrize(
    ("file", "content", "match"),
    [
        ("tokenizer.json", "{}", "no byte-pair vocabulary"),
        (
            "tokenizer.json",
            '{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": "x"}]}',
            "no byte-pair vocabulary",
        ),
        ("tokenizer_config.json", "{}", "not a list"),
        ("tokenizer_config.json", '{"additional_special_tokens": [1]}', "not a token"),
        ("tokenizer_config.json", "[", "not JSON"),
    ],
)
def test_damaged_tokenizer_is_refused(
    file: str, content: str, match: str, tmp_path: Path, diffusers_checkpoint: Path
) -> None:
    with pytest.raises(ArtifactError, match=match):
        build_tokenizer(_broken(tmp_path, diffusers_checkpoint, file, content))


def test_unreadable_tokenizer_is_refused() -> None:
    with pytest.raises(ArtifactError, match="cannot be loaded"):
        check_tokenizer(b'{"model": {"type": "BPE", "vocab": {"a": 0}}}', "tokenizer.json")


def test_published_tokenizer_without_markers_does_not_pass_the_check(diffusers_checkpoint: Path) -> None:
    with pytest.raises(ArtifactError, match="not consecutive"):
        check_tokenizer(
            (diffusers_checkpoint / "tokenizer" / "tokenizer.json").read_bytes(), "tokenizer.json"
        )


def test_token_beyond_the_embedding_is_refused() -> None:
    keys = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    tokens = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    ids = {token: i for i, token in enumerate(tokens)}
    config_ids = {key: i for i, key in enumerate(keys)}
    check_vision_ids(ids, config_ids, vocab_size=4)
    with pytest.raises(ArtifactError, match="beyond the embedding"):
        check_vision_ids(ids, config_ids, vocab_size=3)
