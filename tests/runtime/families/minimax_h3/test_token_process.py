"""A start's tokens out of a process of their own: those that are made here, or no answer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from prepare.tokenizer import build_tokenizer
from runtime.families.minimax_h3.token_process import TokenProcess
from runtime.families.minimax_h3.tokens import MAX_TEXT_ROWS, build_token_stream
from scripts.tiny_presets import preset
from scripts.tiny_tokenizer import write_tokenizer

CONFIG = preset("test").model


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As a prepared directory has it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, preset("test").num_base_tokens)
    complete = folder / "complete.json"
    complete.write_bytes(build_tokenizer(folder)[0])
    return complete


@pytest.fixture
def process(path: Path) -> Iterator[TokenProcess]:
    spawned = TokenProcess(path)
    yield spawned
    spawned.close()


@pytest.mark.parametrize(
    ("prompt", "sizes"),
    [
        ("rain on a tin roof", []),
        ("<d>hello</d> <|image_pad|> 木漏れ日 \n\t é", []),
        ("two pictures", [(64, 64), (96, 64)]),
        ("long " * 3000, []),
    ],
    ids=["plain", "markers and forged tokens", "keyframes", "long"],
)
def test_its_tokens_are_those_made_here(
    process: TokenProcess, path: Path, prompt: str, sizes: list[tuple[int, int]]
) -> None:
    expected = build_token_stream(CONFIG, Tokenizer.from_file(str(path)), prompt, sizes)
    assert process.stream(CONFIG, prompt, sizes) == expected


@pytest.mark.parametrize(
    "prompt", ["", "a " * (MAX_TEXT_ROWS + 1), "x" * (1 << 20)], ids=["empty", "too many", "no packet"]
)
def test_what_it_refuses_has_no_answer(
    process: TokenProcess, capfd: pytest.CaptureFixture[str], prompt: str
) -> None:
    assert process.stream(CONFIG, prompt, []) is None


def test_a_tokenizer_that_cannot_be_read_has_no_answer(tmp_path: Path) -> None:
    broken = TokenProcess(tmp_path / "none.json")
    assert broken.stream(CONFIG, "rain", []) is None
    broken.close()


def test_nothing_is_left_after_close(process: TokenProcess) -> None:
    process.close()
    process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
