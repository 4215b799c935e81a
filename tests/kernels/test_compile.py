"""Ahead-of-time compilation on a machine without a GPU: real cubins, same bytes every time, an index that is accepted."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kernels.catalog import (
    ARCHITECTURES,
    MINIMAX_H3,
    OPERATORS,
    SHIPPED,
    Operator,
    num_tunings,
    specialisations,
)
from kernels.cubin_index import read_index

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
SMALL = '{"hidden": 64, "head_dim": 32, "rotary_dim": 16, "encoder_hidden": 64, "encoder_head_dim": 32}'


def compile_into(out: Path, *arguments: str, cwd: Path) -> None:
    root = str(Path(__file__).parents[2])
    subprocess.run(
        [sys.executable, "-m", "kernels.aot.compile", "--out", str(out), "--jobs", "1", *arguments],
        check=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": root, "TRITON_INTERPRET": "1"},  # must not reach the compiler
    )


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("compiled")
    arguments = [item for name in ARCHITECTURES for item in ("--architecture", name)]
    compile_into(out, *arguments, "--sizes", SMALL, "--operator", "gate_norm_modulate", cwd=out)
    return out


def elf_architecture(image: bytes) -> int:
    """The architecture in a cubin's ELF flags: the low byte, or the second one from ABI version 8 on."""
    flags = int.from_bytes(image[48:52], "little")
    return (flags >> 8 if image[8] >= 8 else flags) & 0xFF


@needs_triton
def test_every_architecture_gets_its_own_cubin(compiled: Path) -> None:
    entries = read_index(compiled)
    assert [entry.architecture for entry in entries] == sorted(ARCHITECTURES)
    for entry in entries:
        image = (compiled / entry.file).read_bytes()
        assert image[:4] == b"\x7fELF"
        assert hashlib.sha256(image).hexdigest() == entry.sha256
        assert entry.sha256[:12] in entry.file
        assert elf_architecture(image) == ARCHITECTURES[entry.architecture]
        assert entry.symbol.encode() in image
        assert entry.constants == {"D": 64}
        assert (entry.block, entry.num_warps, entry.scratch) == (64, 8, 0)
        assert entry.stack_bytes == 0
        assert entry.compiler["options"]["enable_fp_fusion"] is False


@needs_triton
def test_same_sources_give_the_same_bytes_elsewhere(compiled: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    compile_into(
        again, "--architecture", "sm_90a", "--sizes", SMALL, "--operator", "gate_norm_modulate", cwd=tmp_path
    )
    first = [entry for entry in read_index(compiled) if entry.architecture == "sm_90a"]
    assert list(read_index(again)) == first
    assert (again / first[0].file).read_bytes() == (compiled / first[0].file).read_bytes()


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
def test_catalog_lists_the_parameters_of_the_source(operator: Operator) -> None:
    tree = ast.parse(operator.sources()[0].read_text(encoding="utf-8"))
    function = next(
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == operator.name
    )
    names = [argument.arg for argument in function.args.args]
    assert names == [
        *(argument.name for argument in operator.arguments),
        *operator.constants,
        *operator.options,
        "BLOCK",
        "NATIVE",
    ]


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
def test_source_hash_covers_every_module_the_source_imports(operator: Operator) -> None:
    folder = operator.sources()[0].parent
    pending, imported = [operator.name], set()
    while pending:
        tree = ast.parse((folder / f"{pending.pop()}.py").read_text(encoding="utf-8"))
        found = {
            node.module.removeprefix("kernels.aot.")
            for node in tree.body
            if isinstance(node, ast.ImportFrom)
            and node.module is not None
            and node.module.startswith("kernels.")
        }
        pending += found - imported
        imported |= found
    assert imported == set(operator.helpers)


def test_full_size_model_needs_these_kernels() -> None:
    keys = {item.key() for item in specialisations(MINIMAX_H3)}
    assert len(keys) == 13
    assert ("qk_norm_rope", (("HALF", 48), ("K", 128), ("ROUND_FIRST", 0))) in keys
    assert ("rms_norm", (("D", 5120), ("ROUND_FIRST", 1))) in keys


def test_every_tuning_covers_the_same_kernels() -> None:
    keys = [{item.key() for item in specialisations(MINIMAX_H3, tuning)} for tuning in range(num_tunings())]
    assert all(item == keys[0] for item in keys)


def test_what_ships_exists() -> None:
    """Also the one place where a wrong index would show before a deployment prepares with it."""
    assert SHIPPED.keys() == ARCHITECTURES.keys()
    for chosen in SHIPPED.values():
        assert all(0 <= index < len(OPERATORS[name].tunings) for name, index in chosen.items())


def test_row_of_three_tiles_has_no_padding() -> None:
    """5,376 = 4,096 + 1,024 + 256; a width that needs more tiles is one padded tile."""
    split = next(i for i, item in enumerate(OPERATORS["norm_modulate"].tunings) if item.is_split)

    def parts(hidden: int) -> list[int]:
        wanted = specialisations(replace(MINIMAX_H3, hidden=hidden), split)
        (options,) = [item.options for item in wanted if item.operator.name == "norm_modulate"]
        return [options[f"PART_{part}"] for part in "ABC"]

    assert parts(5376) == [4096, 1024, 256]
    assert parts(64) == [64, 0, 0]
    assert parts(240) == [0, 0, 0]


@pytest.mark.slow
@needs_triton
def test_all_kernels_of_the_full_size_model_compile_without_spills(tmp_path: Path) -> None:
    compile_into(tmp_path, "--architecture", "sm_90a", cwd=tmp_path)
    entries = read_index(tmp_path)
    assert len(entries) == len(specialisations(MINIMAX_H3))
    assert {entry.stack_bytes for entry in entries} == {0}
