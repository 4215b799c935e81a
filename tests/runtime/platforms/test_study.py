"""The cold-start study's arithmetic and files, one job from the shell, and bundles on a volume."""

from __future__ import annotations

import csv
import hashlib
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.errors import ArtifactError, RequestError
from runtime.platforms.bundles import prepare_bundle, read_through
from runtime.platforms.shell import local_job, report
from runtime.platforms.study import Sample, collect, percentile, summary, write_study


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=40), st.sampled_from([0.5, 0.9]))
def test_percentiles_are_numpys(values: list[float], share: float) -> None:
    expected = float(numpy.percentile(values, 100 * share))
    assert percentile(values, share) == pytest.approx(
        expected, rel=1e-9, abs=1e-9
    )  # same formula, other order of sums


def samples() -> list[Sample]:
    cold = [
        Sample("us", "H200", {"first_dit_entry": value, "mp4_complete": 10 * value})
        for value in (1.0, 2.0, 3.0)
    ]
    return [
        *cold,
        Sample("eu", "B200", {"first_dit_entry": 5.0}),
        Sample("us", "H200", {"first_dit_entry": 0.1}, is_cold=False),
    ]


def test_warm_calls_do_not_count() -> None:
    rows = summary(samples())
    assert [(row["region"], row["mark"], row["count"], row["p50_s"]) for row in rows] == [
        ("us", "first_dit_entry", 3, 2.0),
        ("us", "mp4_complete", 3, 20.0),
        ("eu", "first_dit_entry", 1, 5.0),
    ]
    assert rows[0]["p90_s"] == pytest.approx(2.8, abs=1e-12)


def test_files_of_a_study(tmp_path: Path) -> None:
    table = write_study(samples(), tmp_path / "study")
    rows = list(csv.DictReader((tmp_path / "study.csv").read_text().splitlines()))
    assert len(rows) == 8
    assert {row["region"] for row in rows} == {"us", "eu"}
    assert ET.fromstring((tmp_path / "study.svg").read_text()).tag.endswith("svg")
    assert "P90 s" in table
    assert "1 of 5 calls" in table


def test_configurations_take_turns() -> None:
    asked: list[tuple[str, str]] = []
    pauses: list[int] = []

    def ask(region: str, gpu: str) -> dict[str, object]:
        asked.append((region, gpu))
        return {"start": {"headline": {"first_dit_entry": 1.0}}}

    made = collect(ask, [("us", "H200"), ("eu", "H200")], 2, lambda: pauses.append(len(asked)))
    assert asked == [("us", "H200"), ("eu", "H200")] * 2
    assert pauses == [2]
    assert all(sample.is_cold and sample.marks["round_trip"] >= 0 for sample in made)


def test_a_refused_call_is_no_sample() -> None:
    refused = Sample.of("us", "H200", 0.0, 1.0, {"error": {"message": "no"}})
    assert (refused.is_cold, refused.error, refused.marks) == (False, "no", {})


def test_a_job_from_the_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jpg").write_bytes(b"jpeg")
    job = local_job("x", size="64x64", seed=0, first_frame=str(tmp_path / "a.jpg"))
    assert job["request"] == {"prompt": "x", "seconds": 5.0, "size": "64x64", "seed": 0}
    assert (job["pictures"], job["kinds"]) == ({"first_frame": b"jpeg"}, {"first_frame": "jpeg"})
    assert "seed" not in local_job("x")["request"]
    with pytest.raises(RequestError, match="cannot be read"):
        local_job("x", last_frame=str(tmp_path / "missing.png"))
    assert report({"error": {"message": "no"}}, "out.mp4") == 2
    assert report({"result": {"seed": 5}, "start": {"headline": {"first_dit_entry": 3.3}}}, "out.mp4") == 0
    assert "first dit entry: 3.30 s" in capsys.readouterr().err


def test_an_existing_bundle_is_left_alone(tmp_path: Path) -> None:
    manifest = tmp_path / "prepared/h3/manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}")

    def download(*_: object) -> None:
        raise AssertionError("nothing to download")

    assert (
        prepare_bundle("a/b", "main", tmp_path, "h3", download=download) == hashlib.sha256(b"{}").hexdigest()
    )


def test_a_checkpoint_that_prepare_refuses(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[str, str]] = []

    def download(repository: str, revision: str, target: Path) -> None:
        asked.append((repository, revision))
        (target / "README.md").write_text("nothing here")

    with pytest.raises(ArtifactError, match="prepare failed"):
        prepare_bundle("a/b", "v1", tmp_path, "h3", download=download)
    assert asked == [("a/b", "v1")]
    assert not (tmp_path / "prepared/h3").exists()
    assert "not a MiniMax-H3 checkpoint" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["", "..", "a/b", "/etc", ".hidden", "x" * 200])
def test_bundle_names_are_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(RequestError, match="not a bundle name"):
        prepare_bundle("a/b", "main", tmp_path, name)


def test_reading_through_counts_every_byte(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/a").write_bytes(b"x" * 1000)
    (tmp_path / "manifest.json").write_bytes(b"y" * 10)
    assert read_through(tmp_path)["bytes"] == 1010
