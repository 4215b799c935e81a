"""A family whose tokenizer is in a process of its own prepares the same request, with or without that process."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from loader.errors import ArtifactError, RequestError
from loader.manifest import read_manifest
from runtime.families.minimax_h3.family import MiniMaxH3

REQUEST = {"prompt": "rain on a tin roof", "width": 64, "height": 64, "num_frames": 22, "seed": 11}


def opened(bundle: Path) -> MiniMaxH3:
    return MiniMaxH3(read_manifest(bundle), bundle, "t2va", "base-3")


def test_requests_are_prepared_as_without_it(bundle: Path) -> None:
    family, plain = opened(bundle), opened(bundle)
    request = family.parse(REQUEST)
    expected = plain.prepare(request)
    family.spawn_tokenizer()
    for found in (family.prepare(request), family.prepare(request)):  # the second one makes its own
        assert found.parts["tokens"] == expected.parts["tokens"]
        assert (found.rows, found.report) == (expected.rows, expected.report)
    family.stop_tokenizer()


def test_a_process_that_died_is_not_missed(bundle: Path) -> None:
    family = opened(bundle)
    family.spawn_tokenizer()
    assert family._token_process is not None
    os.kill(family._token_process.pid, signal.SIGKILL)
    tokens = family.prepare(family.parse(REQUEST)).parts["tokens"]
    assert tokens == opened(bundle).prepare(family.parse(REQUEST)).parts["tokens"]
    assert family._token_process is None


def test_errors_are_those_of_a_start_without_it(bundle: Path, tmp_path: Path) -> None:
    family = opened(bundle)
    family.spawn_tokenizer()
    with pytest.raises(RequestError, match="too long"):
        family.prepare(family.parse({**REQUEST, "prompt": "a " * 17_000}))
    elsewhere = MiniMaxH3(read_manifest(bundle), tmp_path, "t2va", "base-3")
    elsewhere.spawn_tokenizer()
    with pytest.raises(ArtifactError, match="cannot be read as a tokenizer"):
        elsewhere.prepare(elsewhere.parse(REQUEST))
