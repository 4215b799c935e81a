"""The command line: outputs, exit codes, options that reach the model."""

from __future__ import annotations

import csv
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.replay.cli import main
from scripts.replay.cli_options import build_options
from scripts.replay.stats import STAT_WORDS, BurstStats
from tests.replay.test_reading import MODAL

ROOT = Path(__file__).parents[2]
SHORT = ["--synthetic", "ref:hours=4"]


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_run_prints_a_table_and_the_differences(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *SHORT, "--policy", "multiple:2,zero", "--gpu-price", "0.001972"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0].split()[:3] == ["startup", "policy", "R"]
    assert "7.2 zero against 70 multiple:2: overhead -" in out
    assert "requests drawn with seed 0" in err


def test_run_is_a_cross_product_with_differences(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "run", *SHORT, "--startup", "20,7.2", "--policy", "zero,fixed:60")
    names = [(row["startup"], row["policy"]) for row in found["combinations"]]
    assert names == [("20", "zero"), ("20", "fixed:60"), ("7.2", "zero"), ("7.2", "fixed:60")]
    first, last = found["combinations"][0], found["combinations"][3]
    saved = 1 - last["gpu_s"]["allocated"] / first["gpu_s"]["allocated"]
    assert found["differences"][2]["gpu_time_saved"] == pytest.approx(saved)
    assert found["trace"]["digest"]
    assert found["version"]
    assert found["seed"] == 0


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = {name: tmp_path / name for name in ("r.json", "r.csv", "t.csv", "r.parquet")}
    arguments = ["--json", "r.json", "--csv", "r.csv", "--timeline-csv", "t.csv", "--parquet", "r.parquet"]
    arguments = [str(paths.get(item, item)) for item in arguments]
    assert main(["run", *SHORT, "--no-pictures", *arguments]) == 0
    rows = list(csv.DictReader(paths["r.csv"].read_text().splitlines()))
    result = json.loads(paths["r.json"].read_text())
    assert [float(row["share.generating"]) for row in rows] == [
        row["share"]["generating"] for row in result["combinations"]
    ]
    totals: dict[str, float] = {}
    for row in csv.DictReader(paths["t.csv"].read_text().splitlines()):
        totals[row["startup"]] = totals.get(row["startup"], 0.0) + float(row["idle_s"])
    for row in result["combinations"]:
        # Bins are written with six decimals.
        assert totals[row["startup"]] == pytest.approx(row["gpu_s"]["idle"], abs=1e-3)
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["run"],
        ["run", "nowhere.csv"],
        ["run", "--synthetic", "ref", "both.csv"],
        ["run", *SHORT, "--policy", "nonsense"],
        ["run", *SHORT, "--startup", "-3"],
        ["run", *SHORT, "--binding", "other"],
        ["run", *SHORT, "--window", "9:3"],
        ["run", *SHORT, "--thin", "2"],
        ["run", *SHORT, "--max-workers", "0"],
        ["run", *SHORT, "--start-failure", "1,2"],
        ["run", *SHORT, "--system", "nomad"],
        ["search", *SHORT, "--p95-wait", "3", "--max-wait", "9"],
        ["import", "modal", "nowhere.json"],
        ["report", "nowhere.json", "--out", "x.html"],
    ],
)
def test_usage_and_refused_input_exit_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run"], "exactly one trace is needed"),
        (["run", *SHORT, "--json", "/nowhere/x.json"], "--json /nowhere/x.json: cannot be written; found no such folder"),
        (["run", *SHORT, "--report", "/"], "--report /: cannot be written; found a folder"),
        (["generate", "ref:hours=2", "--out", "/nowhere/x.csv"], "no such folder"),
        (["generate", "ref:hours=2", "--out", "trace.txt"], "trace.txt: unknown kind of file; found .txt"),
        (["run", *SHORT, "--jobs", "0"], "--jobs"),
        (["run", *SHORT, "--gpu-price", "-1"], "--gpu-price"),
        (["run", *SHORT, "--wait-value", "nan"], "--wait-value"),
        (["run", *SHORT, "--queue-timeout", "nan"], "queue_timeout_s"),
        (["run", *SHORT, "--scale-delay", "-3"], "scale_delay_s"),
        (["run", *SHORT, "--duration-scale", "0"], "--duration-scale"),
        (["run", *SHORT, "--interval-scale", "nan"], "--interval-scale"),
        (["run", *SHORT, "--warmup", "1e9"], "every request is outside"),
        (["run", *SHORT, "--window", "99999:999999"], "every request is outside"),
        (["search", *SHORT, "--cold", "2"], "--cold"),
        (["search", *SHORT, "--p95-wait", "-1"], "--p95-wait"),
        (["run", "/"], "no such file; found a folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_nonsense_is_refused_by_name_before_anything_is_written(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert words in err
    assert out == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [["--startup", "abc"], ["--policy", "abc"]], ids=" ".join)
def test_misspelt_words_cost_no_reading(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "absent.csv", *arguments]) == 2
    assert "abc" in capsys.readouterr().err


def test_a_full_disk_exits_4_and_leaves_no_half_file(tmp_path: Path) -> None:
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096));"
        "from scripts.replay.cli import main; sys.exit(main(['generate', 'ref:hours=2', '--out', sys.argv[1]]))"
    )
    path = tmp_path / "trace.csv"
    command = [sys.executable, "-B", "-c", code, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 4, done.stderr
    assert "replay: output: File too large" in done.stderr
    assert not path.exists()


def test_search_exits_3_if_the_goal_cannot_be_met(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", *SHORT, "--startup", "70", "--max-wait", "0.1", "--max-workers", "2"]) == 3
    assert (
        "No setting meets the goal (least GPU time with a max wait of at most 0.1 s). Nearest:"
        in capsys.readouterr().out
    )


def test_statistics_are_told_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *SHORT]) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["hours"].strip() == "4"
    assert lines["reference workload with these statistics"].strip().startswith("ref:rate=")
    assert not any("_" in name for name in lines)
    assert set(STAT_WORDS) == {field.name for field in dataclasses.fields(BurstStats)}


def test_search_prints_console_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", *SHORT, "--startup", "7.2", "--p95-wait", "10"]) == 0
    out = capsys.readouterr().out
    assert "modal function autoscaler update APP/FUNC --scaledown-window" in out
    assert "fal apps scale APP --keep-alive" in out


def test_missing_library_exits_4(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    assert main(["run", *SHORT, "--engine", "numba"]) == 4
    assert "coldframe[replay]" in capsys.readouterr().err


def test_stats_and_fit(capsys: pytest.CaptureFixture[str]) -> None:
    stats = run_json(capsys, "stats", "--synthetic", "ref:days=2", "--busy", "0")["stats"]
    assert (stats["hours"], stats["estimator"]) == (48, "disjoint minutes")
    fit = run_json(capsys, "fit", "--synthetic", "ref:days=2", "--busy", "0")["fit"]
    assert fit["spec"].startswith("ref:rate=")


def test_generate_then_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.csv"
    assert main(["generate", "ref:hours=4", "--out", str(path), "--seed", "7"]) == 0
    capsys.readouterr()
    from_file = run_json(capsys, "run", str(path))
    drawn = run_json(capsys, "run", "--synthetic", "ref:hours=4", "--seed", "7")
    for one, other in zip(from_file["combinations"], drawn["combinations"], strict=True):
        assert one["gpu_s"]["allocated"] == pytest.approx(other["gpu_s"]["allocated"], rel=1e-9)


def test_import_modal_with_the_model_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "calls.json"
    path.write_text(json.dumps(MODAL))
    out, startups = tmp_path / "t.csv", tmp_path / "s.json"
    found = run_json(
        capsys,
        "import",
        "modal",
        str(path),
        "--out",
        str(out),
        "--startups-out",
        str(startups),
        "--compare",
        "modal:scaledown_window=60",
    )
    assert found["trace"]["observed"]["cold_wait_mean_s"] == 12.0
    assert found["modelled"]["modelled_cold_wait_mean_s"] == 8.5
    assert out.read_text().splitlines()[1:] == ["0.0,40.0", "60.0,41.0"]
    assert json.loads(startups.read_text()) == {"startup_s": [8.5]}


def test_options_reach_the_model() -> None:
    from scripts.replay.cli import _parser

    arguments = _parser().parse_args(
        ["run", *SHORT, "--max-workers", "9", "--scale-rate", "10/60", "--start-failure", "0.1,5", "--slowdown", "1,1.5", "--window", "5:60",
         "--efficiency", "4=0.8", "--gpus-per-worker", "4", "--scheduling", "modal", "--queue-timeout", "60"]
    )  # fmt: skip
    options, _ = build_options(arguments)
    assert (options.max_workers, options.scale_rate, options.start_failure) == (9, (10, 60.0), (0.1, 5.0))
    assert (options.slowdown, options.window, options.efficiency) == ((1.0, 1.5), (5.0, 60.0), {4: 0.8})
    assert options.is_shared
    assert set(options.as_dict()) >= {"max_workers", "scheduling", "window"}


def test_systems_are_extra_combinations(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "run", *SHORT, "--startup", "7.2", "--system", "fal:keep_alive=60")
    assert [row["policy"] for row in found["combinations"]] == [
        "multiple:2",
        "fixed:60+floor:0+buffer:0,percent=0",
    ]
    assert found["combinations"][1]["options"]["fresh_idle_s"] == 10.0


def test_module_reads_a_trace_from_standard_input() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.replay", "run", "-", "--json"],
        input="timestamp,duration\n0,70\n", capture_output=True, text=True, cwd=ROOT, timeout=60, check=True,
    )  # fmt: skip
    rows = json.loads(done.stdout)["combinations"]
    assert [round(row["share"]["generating"], 4) for row in rows] == [0.25, 0.7642]


def test_help_needs_no_optional_library() -> None:
    code = "import sys; sys.modules.update(numba=None, pyarrow=None, matplotlib=None, ray=None); from scripts.replay.cli import main; sys.exit(main(['run', '--synthetic', 'ref:hours=3']))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "multiple:2" in done.stdout
