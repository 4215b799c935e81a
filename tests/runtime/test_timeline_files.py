"""A timeline's file while several threads write it, as a worker's do during its start, and its picture's labels."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import pytest

from runtime.timeline import Timeline
from runtime.timeline_views import to_svg, write_json


def test_threads_that_write_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    timeline, path, problems = Timeline(0), tmp_path / "start.json", []
    together = threading.Barrier(4)

    def write() -> None:
        together.wait()
        try:
            for _ in range(40):
                write_json(timeline, path)
        except OSError as error:
            problems.append(error)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert "traceEvents" in json.loads(path.read_text("utf-8"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["start.json"]


def labels(timeline: Timeline) -> dict[str, tuple[str, float]]:
    """Anchor and place of every text of the picture."""
    texts = re.findall(
        r'<text x="([\d.]+)" y="\d+" text-anchor="(\w+)" fill="#333"[^>]*>(.*?)</text>', to_svg(timeline, "")
    )
    return {text: (anchor, float(x)) for x, anchor, text in texts}


def test_a_label_that_would_leave_the_picture_stands_before_its_bar() -> None:
    timeline = Timeline(0)
    long = "reader used 10 threads, waited 2.384 s for slots"
    timeline.add_span("short", 0, 1_000_000, thread="a")
    timeline.add_span(long, 9_990_000, 10_000_000, thread="a")
    timeline.add_span("last", 9_990_000, 10_000_000, thread="b")
    found = labels(timeline)
    anchor, x = found[f"{long}  under 1 ms"]
    assert anchor == "end"
    assert 190 + 86 < x < 190 + 860
    assert found["last  under 1 ms"] == ("start", pytest.approx(1054.1))


def test_a_label_with_no_room_on_either_side_is_cut_with_a_sign() -> None:
    timeline = Timeline(0)
    timeline.add_span("all along", 0, 9_990_000, thread="a")
    timeline.add_span("w" * 60, 9_990_000, 10_000_000, thread="a")
    (cut,) = (text for text in labels(timeline) if text.startswith("w"))
    assert cut.endswith("…")
    assert 30 < len(cut) < 40


def test_a_point_in_time_has_no_duration() -> None:
    timeline = Timeline(0)
    timeline.add_span("first byte", 0, 5_000_000, thread="a")
    timeline.add_span("every slot pinned", 7_000_000, 7_000_000, thread="b")
    assert "every slot pinned" in labels(timeline)
