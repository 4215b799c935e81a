"""The tuning mode of the operators' bench, dry over Triton's interpreter, and what it takes of a library along."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from kernels.catalog import MINIMAX_H3, OPERATORS
from scripts.bench.flashinfer_carry import carry
from scripts.bench.fused_cases import CASES, LIBRARIES
from scripts.bench.fused_operators import print_tuning, summarise, tune


def test_every_operator_says_what_a_library_has() -> None:
    assert {case.method for case in CASES.values()} <= LIBRARIES.keys()


def test_what_ships_is_what_counts() -> None:
    timed = {"bytes": 3000, "copy_us": 2.0, "tunings": {0: {"us": 4.0}, 1: {"us": 3.0}, 2: {"us": 5.0}}}
    found = summarise(timed, bandwidth=1e9, shipped=2)
    assert (found["ours_us"], found["best_tuning"], found["best_us"]) == (5.0, 1, 3.0)
    assert found["share"] == pytest.approx(3.0 / 5.0)


def test_carried_part_of_a_library_has_no_generated_sources(tmp_path: Path) -> None:
    wheel, out = tmp_path / "flashinfer.whl", tmp_path / "out.zip"
    source = "flashinfer/data/csrc/"
    kept = {
        "flashinfer/__init__.py": 10,
        f"{source}norm.cu": 1000,
        "flashinfer/data/include/flashinfer/norm.cuh": 90_000,
        "flashinfer/data/cutlass/include/a.h": 5,
    }
    left = {f"{source}moe.cu": 65_537, f"{source}cake_x.cu": 5, f"{source}fused/a.cu": 5, "flashinfer/data/cutlass/tools/b": 5}  # fmt: skip
    with zipfile.ZipFile(wheel, "w") as file:
        for name, size in (kept | left).items():
            file.writestr(name, bytes(size))
    assert carry(wheel, out) == out.stat().st_size
    with zipfile.ZipFile(out) as file:
        assert {item.filename: item.file_size for item in file.infolist()} == kept


@pytest.mark.usefixtures("interpreted")
def test_every_tuning_is_checked_timed_and_ranked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.kernels.interpreter import fake_kernels

    numbers = range(len(OPERATORS["norm_modulate"].tunings))
    sets = {number: fake_kernels(tmp_path / str(number), MINIMAX_H3, number)[0] for number in numbers}
    case = CASES["norm_modulate"]
    result = tune(case, sets, 1e12, rounds=1, check_rows=(1,), timed_rows=(3,))
    assert result["checks"].keys() == {f"{number}@1" for number in numbers}
    timed = result["timed"]["3"]
    assert timed["median_us"].keys() == set(numbers)
    assert timed["best_us"] == min(timed["median_us"].values())
    print_tuning(case, "sm_90a", result["timed"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith(f"SHIPPED['sm_90a']['norm_modulate'] = {timed['best']}")
    assert len(lines) == len(numbers) + 1
