"""Formats, columns, clocks, importers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from loader.errors import RequestError
from scripts.replay import reading
from scripts.replay.cli import main
from scripts.replay.cli_files import write_trace
from scripts.replay.importers import fleet_check, import_trace, startups_from_timelines
from scripts.replay.laws import parse_law
from scripts.replay.reading import Columns, read_trace
from scripts.replay.traces import Trace, durations_by_size, merge_pools, thin
from scripts.replay.workload import synthetic

ROWS = [(0.0, 5.0, "a"), (2.5, 6.0, "b"), (2.5, 0.5, "a")]


def check(trace: Trace) -> None:
    assert trace.arrivals.tolist() == [0.0, 2.5, 2.5]
    assert trace.durations.tolist() == [5.0, 6.0, 0.5]
    assert [trace.pool_names[code] for code in trace.pools] == ["a", "b", "a"]


def as_csv() -> str:
    return "time,model,generation\n" + "".join(f"{t + 7},{pool},{g}\n" for t, g, pool in ROWS)


@pytest.mark.parametrize("form", ["csv", "gzip", "jsonl", "json", "parquet", "tab"])
def test_formats(form: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    objects = [{"arrival": t, "duration": g, "pool": pool} for t, g, pool in ROWS]
    columns = Columns()
    if form == "csv":
        path.write_text(as_csv())
    elif form == "gzip":
        path.write_bytes(gzip.compress(as_csv().encode()))
    elif form == "jsonl":
        path.write_text("\n".join(map(json.dumps, objects)))
    elif form == "json":
        path.write_text(json.dumps(objects))
    elif form == "parquet":
        pq.write_table(pa.Table.from_pylist(objects), path)
    else:
        path.write_text(as_csv().replace(",", "\t"))
        columns = Columns(delimiter="\t")
    check(read_trace(str(path), columns))


def test_columns_by_name(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("when,secs,who\n" + "".join(f"{t},{g},{pool}\n" for t, g, pool in ROWS))
    check(read_trace(str(path), Columns("when", "secs", "who")))
    with pytest.raises(RequestError, match="no duration column"):
        read_trace(str(path), Columns("when", "seconds", "who"))


def test_parquet_with_timestamps(tmp_path: Path) -> None:
    from datetime import UTC, datetime, timedelta

    path = tmp_path / "trace.parquet"
    begin = datetime(2026, 3, 1, 8, 15, tzinfo=UTC)
    stamps = [begin + timedelta(seconds=t) for t, _, _ in ROWS]
    pq.write_table(
        pa.table({"timestamp": stamps, "duration": [g for _, g, _ in ROWS], "pool": [p for _, _, p in ROWS]}),
        path,
    )
    trace = read_trace(str(path))
    check(trace)
    assert trace.clock_s == 900.0


def test_declared_unit_beats_the_magnitude(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("timestamp,duration\n1000,1\n3500,1\n")
    assert read_trace(str(path), Columns(unit="ms")).arrivals.tolist() == [0.0, 2.5]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("timestamp,duration\n1,2\n1789367415.9,2\n3,2\n", ["line 3", "mixed", "origin"]),
        ("timestamp,duration\n1789367403,2\n1789367415910,2\n", ["line 3", "two units"]),
        ("timestamp,duration\n1,2\n400000000,2\n5,2\n", ["line 4", "mixed", "jumps"]),
        ("timestamp,duration\n1,2\nsoon,2\n", ["line 3", "timestamp"]),
        ("timestamp,duration\n2026-01-01T00:00:00Z,2\n2026-13-01T00:00:00Z,2\n", ["line 3", "timestamp"]),
        ("timestamp,duration\n1,2\n2,1_000\n", ["line 3", "duration"]),
        ("timestamp,duration\n1,2\n2,3,4\n", ["line 3", "columns"]),
        ("timestamp,duration\n1,2\n2,0x10\n", ["line 3", "duration"]),
        ("timestamp,duration\n1,2\n2,٣\n", ["line 3", "duration"]),
        ('timestamp,duration\n1,2\n2,"3\n', ["csv"]),
        ("[1, 2]", ["not an object"]),
        ('{"timestamp": 1, "duration": NaN}', ["duration"]),
        ("{", ["not json"]),
    ],
)
def test_refusals_name_the_line(text: str, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text, "utf-8")
    with pytest.raises(RequestError) as refusal:
        read_trace(str(path))
    assert all(word in str(refusal.value).lower() for word in words), str(refusal.value)
    assert str(refusal.value).startswith("trace.csv: ")


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x1f\x8b\x08broken", id="bad-header"),
        pytest.param(gzip.compress(b"timestamp,duration\n1,2\n" * 99, mtime=0)[:-9], id="cut-short"),
    ],
)
def test_damaged_gzip_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(data)
    with pytest.raises(RequestError, match="gzip"):
        read_trace(str(path))


def test_a_gzip_bomb_stops_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_UNZIPPED_BYTES", 1000)
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(b"0" * 100_000))
    with pytest.raises(RequestError, match="too large"):
        read_trace(str(path))


def test_quick_and_careful_readers_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.csv"
    write_trace(synthetic("ref:hours=5,pools=4", 1), path)
    quick = read_trace(str(path))
    monkeypatch.setattr(reading, "_read_fast", lambda *_: None)
    careful = read_trace(str(path))
    assert quick.digest() == careful.digest()
    assert quick.pool_names == careful.pool_names


def test_plain_numpy_reader_agrees_with_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.csv"
    write_trace(synthetic("ref:hours=5", 1), path)
    quick = read_trace(str(path))
    monkeypatch.setattr(reading, "is_installed", lambda _: False)
    assert read_trace(str(path)).digest() == quick.digest()


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_written_trace_reads_back_to_the_bit(suffix: str, tmp_path: Path) -> None:
    trace = synthetic("ref:hours=5,pools=3", 1)
    write_trace(trace, tmp_path / f"t.{suffix}")
    found = read_trace(str(tmp_path / f"t.{suffix}"))
    # Moved to the first event; pools are numbered in order of appearance.
    assert np.array_equal(found.arrivals, trace.arrivals - trace.arrivals[0])
    assert np.array_equal(found.durations, trace.durations)
    assert [found.pool_names[code] for code in found.pools] == [
        trace.pool_names[code] for code in trace.pools
    ]


def test_thinning_by_one_is_the_identity_and_pools_merge() -> None:
    trace = synthetic("ref:hours=5,pools=3", 1)
    from fractions import Fraction

    assert thin(trace, Fraction(1), 0) is trace
    assert len(thin(trace, Fraction(1, 10), 0)) == pytest.approx(len(trace) / 10, rel=0.2)
    assert merge_pools(trace).pool_names == ("all",)


MODAL = [
    {"enqueued_at": "2026-03-01T08:00:00+00:00", "started_at": "2026-03-01T08:00:12+00:00", "container_id": "ta-1",
     "startup_time_seconds": 8.5, "execution_time_seconds": 40.0, "status": "SUCCESS", "service_method_name": "W.run", "function_call_id": "fc-1"},
    {"enqueued_at": "2026-03-01T08:01:00+00:00", "started_at": "2026-03-01T08:01:00.5+00:00", "container_id": "ta-1",
     "startup_time_seconds": None, "execution_time_seconds": 41.0, "status": "SUCCESS", "service_method_name": "W.run", "function_call_id": "fc-2"},
    {"enqueued_at": "2026-03-01T07:59:00+00:00", "started_at": None, "container_id": None, "startup_time_seconds": None,
     "execution_time_seconds": None, "status": "TERMINATED", "service_method_name": "W.run", "function_call_id": "fc-3"},
]  # fmt: skip


def test_modal_export(tmp_path: Path) -> None:
    path = tmp_path / "calls.json"
    path.write_text(json.dumps(MODAL))
    trace = import_trace("modal", str(path))
    assert trace.arrivals.tolist() == [0.0, 60.0]
    assert trace.durations.tolist() == [40.0, 41.0]
    assert (trace.pool_names, trace.startups) == (("W.run",), (8.5,))
    observed = trace.facts["observed"]
    assert isinstance(observed, dict)
    assert (observed["cold_wait_mean_s"], observed["platform_mean_s"]) == (12.0, 3.5)
    assert trace.facts["rows_dropped"] == 1
    assert trace.facts["status"] == {"SUCCESS": 2, "TERMINATED": 1}


def test_worker_log_is_the_same_on_every_platform(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    lines = [
        {
            "request_id": "a",
            "received_at": 1789367403.5,
            "started_at": 1789367410.5,
            "finished_at": 1789367450.0,
            "pool": "h3",
            "startup_s": 7.0,
        },
        {
            "request_id": "b",
            "received_at": 1789367500.5,
            "started_at": None,
            "finished_at": None,
            "pool": "h3",
            "startup_s": None,
        },
        {
            "request_id": "c",
            "received_at": 1789367503.5,
            "started_at": 1789367503.5,
            "finished_at": 1789367540.0,
            "pool": "h3",
            "startup_s": None,
        },
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    trace = import_trace("fal", str(path))
    assert (trace.arrivals.tolist(), trace.durations.tolist(), trace.startups) == (
        [0.0, 100.0],
        [39.5, 36.5],
        (7.0,),
    )


def test_fal_fleet(tmp_path: Path) -> None:
    path = tmp_path / "runners.json"
    path.write_text(
        json.dumps(
            [
                {
                    "runner_id": "r",
                    "state": "idle",
                    "uptime_seconds": 90,
                    "in_flight_requests": 0,
                    "machine_type": "GPU-H200",
                }
            ]
        )
    )
    assert fleet_check(path) == {"runners": 1, "uptime_s": 90.0, "machines": {"GPU-H200": 1}}


def test_timelines_of_this_project(tmp_path: Path) -> None:
    from runtime.timeline import Timeline
    from runtime.timeline_views import write_json

    timeline = Timeline(origin_ns=0)
    timeline.mark("first_read", t_ns=20_000_000)
    timeline.mark("first_dit_entry", t_ns=7_210_000_000)
    timeline.mark("mp4_complete", t_ns=60_000_000_000)
    timeline.note(device="H200", region="eu")
    write_json(timeline, tmp_path / "a.json")
    assert startups_from_timelines([tmp_path / "a.json"]) == {"H200 eu": [7.21]}
    for option in ("--out", "--startups-out"):
        target = tmp_path / f"{option}.json"
        assert main(["import", "timelines", str(tmp_path / "a.json"), option, str(target)]) == 0
        assert json.loads(target.read_text())["startup_s"] == [7.21]


@pytest.mark.parametrize(
    ("kind", "text", "arrivals", "durations", "pools"),
    [
        ("azure-llm", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,10,20\n2023-11-16 18:15:47.6805900,30,40\n", [0, 1], [0, 0], ["all"]),
        ("burstgpt", "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,3,4,7,API\n45,GPT-4,3,4,7,API\n", [0, 40], [0, 0], ["ChatGPT", "GPT-4"]),
        ("burstgpt", "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,1,2.5,ChatGPT,3,4,7,API\n", [0], [2.5], ["ChatGPT"]),
        ("gentd26", "gmt_create,predict_status,exec_time_seconds,checkpoint_model_version_id\n2026-01-01 00:00:09,SUCCEED,23,m1\n2026-01-01 00:00:01,FAILED,3,m1\n2026-01-01 00:00:05,SUCCEED,0,m1\n2026-01-01 00:00:04,SUCCEED,40,m2\n", [0, 5], [40, 23], ["m1", "m2"]),
        ("azure-functions", "app,func,end_timestamp,duration\nx,f,100,30\ny,f,95,2\n", [0, 23], [30, 2], ["x", "y"]),
    ],
)  # fmt: skip
def test_published_traces(
    kind: str, text: str, arrivals: list[float], durations: list[float], pools: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    trace = import_trace(kind, str(path))
    assert trace.arrivals.tolist() == pytest.approx(arrivals)
    assert trace.durations.tolist() == durations
    assert list(trace.pool_names) == pools


def test_gentd26_says_what_it_dropped(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "gmt_create,predict_status,exec_time_seconds,checkpoint_model_version_id\n2026-01-01 00:00:09,SUCCEED,23,m\n2026-01-01 00:00:09,FAILED,3,m\n"
    )
    trace = import_trace("gentd26", str(path))
    assert trace.facts["dropped"] == {"predict_status is not SUCCEED": 1}
    assert "redistribute" in str(trace.facts["licence"])


def test_huawei_cold_start_components(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "timestamp,funcName,runtime,podAllocationCost,deployCodeCost,deployDependencyCost,schedulingCost\n5,f,1.5,0.25,0.5,0.125,0.125\n6,f,2,,,,\n"
    )
    trace = import_trace("huawei", str(path))
    assert (trace.startups, trace.durations.tolist()) == ((1.0,), [1.5, 2.0])


def test_service_times_proportional_to_a_size(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("timestamp,generated_tokens\n0,1\n1,2\n2,9\n3,100\n")
    trace = read_trace(str(path), Columns(sizes=("generated_tokens",)), needs_duration=False)
    # Mean size 28, mean 50 s: 1.79 → 10 (clipped), 3.57 → 10, 16.07, 178.57.
    assert durations_by_size(trace, "generated_tokens", 50.0).durations == pytest.approx(
        [10, 10, 50 * 9 / 28, 50 * 100 / 28]
    )


@pytest.mark.parametrize("text", ["[]", "[1]", "{"])
def test_bad_exports_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "calls.json"
    path.write_text(text)
    with pytest.raises(RequestError):
        import_trace("modal", str(path))


def test_samples_from_files(tmp_path: Path) -> None:
    for name, text in (
        ("a.json", "[7, 8.5]"),
        ("b.json", '{"startup_s": [7, 8.5]}'),
        ("c.txt", "startup_s\n7\n8.5\n"),
    ):
        (tmp_path / name).write_text(text)
        law = parse_law(f"empirical:{tmp_path / name}")
        assert law.mean() == 7.75
        assert set(law.draw(np.random.default_rng(0), 100).tolist()) == {7.0, 8.5}
