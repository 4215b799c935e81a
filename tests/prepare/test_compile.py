"""Kernels of a prepared directory: what is written, and what a missing or failing compiler looks like."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from kernels.catalog import ModelSizes
from kernels.cubin_index import parse_entries, read_index
from loader.errors import CapabilityError
from prepare.compile import compile_kernels

# Only SwiGLU fits these sizes, so one cubin is compiled.
SIZES = ModelSizes(hidden=40, head_dim=24, rotary_dim=16, encoder_hidden=40, encoder_head_dim=24)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_manifest_entries_are_the_index(tmp_path: Path) -> None:
    entries = compile_kernels(tmp_path, SIZES, ["sm_90a"])
    assert [entry["operator"] for entry in entries] == ["swiglu"]
    assert parse_entries(entries) == read_index(tmp_path / "kernels")
    assert (tmp_path / "kernels" / entries[0]["file"]).stat().st_size == entries[0]["size"]


def test_no_architecture_compiles_nothing(tmp_path: Path) -> None:
    assert compile_kernels(tmp_path, SIZES, []) == []
    assert list(tmp_path.iterdir()) == []


def test_unknown_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CapabilityError, match=r"unknown architecture; found \['sm_80'\]; allowed: \['sm_100a'"
    ):
        compile_kernels(tmp_path, SIZES, ["sm_80", "sm_90a"])


def test_failing_compiler_is_reported_with_its_last_words(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(CapabilityError, match=r"sm_90a: kernels could not be compiled; found "):
        compile_kernels(blocked, SIZES, ["sm_90a"])
