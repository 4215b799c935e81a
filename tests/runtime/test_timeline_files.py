"""A timeline's file while several threads write it, as a worker's do during its start."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from runtime.timeline import Timeline
from runtime.timeline_views import write_json


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
