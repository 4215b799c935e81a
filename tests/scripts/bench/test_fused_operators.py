"""The tuning mode of the operators' bench, dry over Triton's interpreter, and what it takes of a library along."""

from __future__ import annotations

import dataclasses
import importlib.util
import time
import zipfile
from pathlib import Path

import pytest

from kernels.catalog import MINIMAX_H3, OPERATORS
from kernels.cubin import KernelSet
from kernels.cubin_index import read_index
from scripts.bench.flashinfer_carry import carry
from scripts.bench.fused_cases import CASES, LIBRARIES, Case
from scripts.bench.fused_operators import ALL_CASES, Run, compile_tunings, host_cost, time_case, tune
from scripts.bench.fused_report import print_table, print_tuning, summarise, targets
from scripts.bench.progress import Progress


def test_every_operator_says_what_a_library_has() -> None:
    assert {case.method for case in CASES.values()} <= LIBRARIES.keys()


def test_what_ships_is_what_counts() -> None:
    timed = {"bytes": 3000, "copy_us": 2.0, "tunings": {0: {"us": 4.0}, 1: {"us": 3.0}, 2: {"us": 5.0}}}
    found = summarise(timed, bandwidth=1e9, shipped=2)
    assert (found["ours_us"], found["best_tuning"], found["best_us"]) == (5.0, 1, 3.0)
    assert found["share"] == pytest.approx(3.0 / 5.0)


def sets_of(tmp_path: Path, *numbers: int) -> dict[int, KernelSet]:
    from tests.kernels.interpreter import fake_kernels

    return {number: fake_kernels(tmp_path / str(number), MINIMAX_H3, number)[0] for number in numbers}


def small(*names: str) -> dict[str, Case]:
    return {name: dataclasses.replace(ALL_CASES[name], check_rows=(1, 3), timed_rows=(2,)) for name in names}


@pytest.mark.usefixtures("interpreted")
def test_every_operator_is_checked_and_timed_in_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of them at released widths, the decoder's too, through the launch path of a GPU."""
    states: list[tuple[bool, int]] = []
    run = Run(
        small(*ALL_CASES),
        Progress(1e6),
        lambda found: states.append((found["complete"], len(found["cases"]))),
    )
    sets = sets_of(tmp_path, 0)
    run.measure(sets, 1e12, {"host": lambda: host_cost(sets[0], count=1), "attention": dict})
    assert {name: case.get("failed") for name, case in run.figures["cases"].items()} == dict.fromkeys(
        ALL_CASES
    )
    assert states == [*((False, number + 1) for number in range(len(ALL_CASES))), (True, len(ALL_CASES))]
    assert run.figures["missing"] == []
    assert run.figures["host"].keys() == {"operator_us", "launch_us"}
    assert all(case["timed"]["2"]["ours_tuning"] == 0 for case in run.figures["cases"].values())
    print_table(run.figures)
    assert capsys.readouterr().out.count("decoder_") == 3


@pytest.mark.usefixtures("interpreted")
def test_when_the_time_is_over_no_operator_begins_and_only_what_ships_is_timed(tmp_path: Path) -> None:
    names = ("gate_residual", "rms_norm")
    run = Run(small(*names), Progress(0), lambda found: None)
    run.measure(sets_of(tmp_path, 0, 1), 1e12, {"host": dict})
    assert run.figures["cases"] == {}
    assert run.figures["missing"] == [*names, "host"]

    stopped = time_case(small(names[0])[names[0]], 2, sets_of(tmp_path / "again", 1, 0), time.perf_counter())
    assert list(stopped["tunings"]) == [0]


@pytest.mark.usefixtures("interpreted")
def test_a_figure_that_fails_is_named(tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("no context")

    run = Run({}, Progress(1e6), lambda found: None)
    run.measure(sets_of(tmp_path, 0), 1e12, {"host": fail, "attention": dict})
    assert run.figures["host"] == {"failed": "RuntimeError: no context"}
    assert (run.figures["complete"], run.figures["missing"]) == (False, ["host"])


def test_targets_are_of_what_was_timed() -> None:
    timed = {"ours_us": 29.0, "share": 0.9}
    figures = {
        "cases": {"norm_modulate": {"timed": {"4722": timed}}, "swiglu": {"timed": {"4722": {"tunings": {}}}}}
    }
    assert {name: found["met"] for name, found in targets(figures, CASES).items()} == {
        "fused_norm_modulate_us": True, "fused_norm_modulate_bandwidth_share": True,
    }  # fmt: skip


@pytest.mark.slow
def test_every_tuning_compiles_with_the_operators_that_have_it(tmp_path: Path) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("no compiler")
    folders = compile_tunings(tmp_path, "sm_90a", (0, 10))
    assert {number: {entry.operator for entry in read_index(folder)} for number, folder in folders.items()} == {
        0: set(OPERATORS), 10: {"norm_modulate"},
    }  # fmt: skip


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
