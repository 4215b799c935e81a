"""Progress: bytes, rate, time left; drawn on terminals only."""

from __future__ import annotations

import io

import pytest

from prepare.progress import Progress, ProgressReport, format_seconds, progress_line, terminal_renderer


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_rate_and_time_left_follow_the_clock() -> None:
    times = iter([0.0, 0.1, 2.0, 4.0])
    reports: list[ProgressReport] = []
    progress = Progress(4_000_000_000, reports.append, clock=lambda: next(times))
    progress.advance(1)  # too soon after the start to be reported
    progress.advance(999_999_999)
    progress.advance(3_000_000_000)
    assert reports == [
        ProgressReport(1_000_000_000, 4_000_000_000, 0.5, 6.0),
        ProgressReport(4_000_000_000, 4_000_000_000, 1.0, 0.0),
    ]


def test_line_states_share_bytes_rate_and_time_left() -> None:
    line = progress_line(ProgressReport(45_000_000_000, 90_000_000_000, 1.5, 30.0))
    assert line == "[############            ]  50%  45.0/90.0 GB, 1.50 GB/s, 0:30 left"


def test_nothing_is_drawn_outside_a_terminal() -> None:
    assert terminal_renderer(io.StringIO()) is None


def test_terminal_line_is_redrawn_and_ended() -> None:
    terminal = _Terminal()
    draw = terminal_renderer(terminal)
    assert draw is not None
    draw(ProgressReport(1, 2, 0.0, None))
    draw(ProgressReport(2, 2, 0.0, 0.0))
    assert terminal.getvalue().count("\r") == 2
    assert terminal.getvalue().endswith("\n")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (75, "1:15"), (3600, "1:00:00"), (59.6, "1:00")]
)
def test_time_format(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
