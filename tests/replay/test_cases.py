"""Trace files that people sent: accepted with the stated metrics, repaired with a note, or refused with the line."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from loader.errors import RequestError
from scripts.replay.cli import main
from scripts.replay.laws import Constant
from scripts.replay.options import Options
from scripts.replay.policies import parse_plan
from scripts.replay.reading import read_trace
from scripts.replay.simulate import simulate
from scripts.replay.traces import Trace, stretch

INPUTS = Path(__file__).parents[1] / "cases" / "inputs"
CASES = {
    case["id"]: case for case in json.loads((INPUTS / "index.json").read_text()) if case["group"] == "traces"
}
REFUSED = [name for name, case in CASES.items() if case["expect"]["outcome"] == "reject"]
READ = [name for name in CASES if name not in REFUSED]
SAME = [name for name in READ if CASES[name]["expect"].get("same_metrics_as")]
# Rows that a reader may treat either way: this one reads all of them.
ROWS = {"S17": 1, "S18": 1000}


def read(case: str) -> Trace:
    return read_trace(str(INPUTS / CASES[case]["file"]))


def figures(trace: Trace) -> tuple[float, ...]:
    outcome = simulate(trace, Constant(70.0), parse_plan("multiple:2"))
    share = outcome.generating_s / outcome.allocated_s
    return (share, outcome.starts, outcome.idle_s, float(outcome.waits.mean()), outcome.peak_workers)


@pytest.mark.parametrize("case", REFUSED)
def test_bad_trace_is_refused_with_line_and_reason(case: str) -> None:
    with pytest.raises(RequestError) as refusal:
        read(case)
    text = str(refusal.value).lower()
    assert all(word in text for word in CASES[case]["expect"]["say"]), text
    assert refusal.value.http_status in CASES[case]["expect"]["http"]


@pytest.mark.parametrize("case", REFUSED)
def test_refusal_exits_2_with_one_line_and_no_result(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["run", str(INPUTS / CASES[case]["file"]), "--json"])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("case", READ)
def test_good_trace_serves_every_request(case: str) -> None:
    trace = read(case)
    outcome = simulate(trace, Constant(70.0), parse_plan("multiple:2"))
    assert len(trace) == ROWS.get(case, 200)
    assert not np.isnan(outcome.waits).any()
    # Split without gaps: the recorded stretches add up to the totals. A clock at 3.2e8 s resolves 6e-8 s.
    assert outcome.intervals is not None
    parts = sum(outcome.intervals.seconds(kind) for kind in outcome.intervals.spans)
    assert parts == pytest.approx(outcome.allocated_s, rel=1e-12, abs=1e-6)


@pytest.mark.parametrize("case", SAME)
def test_same_requests_written_differently_give_the_same_metrics(case: str) -> None:
    # Dates as float64 seconds since 1970 keep 2.4e-7 s.
    assert figures(read(case)) == pytest.approx(figures(read("S01")), rel=1e-8)


def test_s02_reports_the_rows_it_moved() -> None:
    facts = read("S02").facts
    assert facts["rows_moved"] == 198
    assert facts["rows_dropped"] == 0


def test_s03_equal_stamps_keep_file_order() -> None:
    trace = read("S03")
    rows = [line.split(",") for line in (INPUTS / CASES["S03"]["file"]).read_text().split()[1:]]
    assert trace.facts["equal_stamps"] == len(rows) - len({row[0] for row in rows})
    assert trace.durations.tolist() == [float(row[1]) for row in rows]


def test_s05_a_negative_offset_becomes_second_zero() -> None:
    trace = read("S05")
    assert trace.arrivals[0] == 0
    assert trace.facts["shifted_by_s"] == -5


def test_s14_a_clock_stepping_back_is_counted() -> None:
    facts = read("S14").facts
    assert facts["steps_back"] == 1
    assert isinstance(facts["rows_moved"], int)
    assert facts["rows_moved"] > 0


def test_s18_nothing_starts_after_the_last_request_is_assigned() -> None:
    trace = read("S18")
    outcome = simulate(trace, Constant(5.0), parse_plan("fixed:30"), Options(max_workers=100))
    assert (outcome.starts, outcome.peak_workers, outcome.useless) == (100, 100, 0)
    # Ten waves of 60 s behind one start of 5 s.
    expected = np.repeat(5.0 + 60.0 * np.arange(10), 100)
    assert np.array_equal(np.sort(outcome.waits), expected)
    assert outcome.intervals is not None
    assert outcome.intervals.spans["starting"][0].max() == 0.0


def test_s31_zero_durations_are_legal() -> None:
    outcome = simulate(read("S31"), Constant(0.0), parse_plan("zero"))
    assert outcome.allocated_s == 0
    assert main(["run", str(INPUTS / CASES["S31"]["file"]), "--startup", "0", "--policy", "zero"]) == 0


def test_s32_two_clusters_a_thousand_apart_are_warned_about() -> None:
    warnings = read("S32").facts["warnings"]
    assert isinstance(warnings, list)
    assert "milliseconds" in warnings[0]
    assert read("S01").facts["warnings"] == []


def test_s36_ten_silent_years_cost_nothing() -> None:
    trace = read("S36")
    begin = time.process_time()
    outcome = simulate(trace, Constant(70.0), parse_plan("multiple:2"))
    assert outcome.starts > 2
    # Not a speed claim: a loop over the 3.2e8 empty seconds would take minutes.
    assert time.process_time() - begin < CASES["S36"]["expect"]["limit_s"]


def test_s38_a_start_is_counted_once_per_release() -> None:
    trace = read("S38")
    gaps = trace.arrivals[1:] - (trace.arrivals[:-1] + trace.durations[:-1])
    for retention in (14.999, 15.0, 15.001):
        outcome = simulate(trace, Constant(0.0), parse_plan(f"fixed:{retention}"))
        assert outcome.starts == 1 + int((gaps > retention).sum())
    assert set(np.round(gaps, 9)) == {15.0}


def test_s39_interval_scale_acts_on_gaps_only() -> None:
    scaled, expected = stretch(read("S01"), 10.0), read("S39")
    # Ten times a three-decimal number, twice rounded.
    assert np.allclose(scaled.arrivals, expected.arrivals, rtol=0, atol=1e-9)
    assert np.array_equal(scaled.durations, expected.durations)


def test_an_empty_result_never_exits_0(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("timestamp,duration\n1,2\n")
    assert main(["run", str(path), "--thin", "1/1000000"]) == 2
