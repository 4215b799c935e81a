"""The page and the text of a search: whole, told in words, escaped, the same from a stored result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.replay.cli import main
from scripts.replay.search_report import search_html, search_text
from tests.replay.test_report import Inventory

COMMAND = ["search", "--synthetic", "ref:rate=5,hours=5", "--startup", "7.2", "--gpu-price", "0.002"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("search")
    outputs = ["--json", str(folder / "s.json"), "--report", str(folder / "s.html")]
    assert main([*COMMAND, "--p95-wait", "10", *outputs]) == 0
    return folder


@pytest.fixture(scope="module")
def found(files: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((files / "s.json").read_text())
    return result


def inventory(page: str) -> Inventory:
    parsed = Inventory()
    parsed.feed(page)
    return parsed


def test_the_page_is_one_whole_file_without_script_or_outside(files: Path) -> None:
    parsed = inventory((files / "s.html").read_text("utf-8"))
    assert parsed.open == []
    assert (parsed.tags.count("svg"), parsed.tags.count("script")) == (1, 0)
    assert [item for item in parsed.references if not item.startswith(("#", "data:,"))] == []
    assert not list(files.glob("*.part"))


def test_the_page_has_the_choice_the_frontier_and_what_to_paste(found: dict[str, Any]) -> None:
    text = " ".join(inventory(search_html(found)).text)
    assert "least GPU time with a p95 wait of at most 10 s" in text
    for point in found["frontier"]:
        assert f"{point['gpu_hours']:,.1f}" in text
    assert f"{found['chosen']['cost_usd']:,.2f} USD" in text
    for lines in found["console"].values():
        assert lines[0] in text


def test_a_stored_search_gives_the_same_page(files: Path) -> None:
    assert main(["report", str(files / "s.json"), "--out", str(files / "again.html")]) == 0
    assert (files / "again.html").read_bytes() == (files / "s.html").read_bytes()
    assert main(["report", str(files / "s.json"), "--plots", str(files / "plots")]) == 2


def test_a_missed_goal_is_told_first(found: dict[str, Any]) -> None:
    missed = {name: value for name, value in found.items() if name not in ("console", "confidence")} | {
        "chosen": None
    }
    assert "No setting meets the goal; the nearest" in search_html(missed)
    assert search_text(missed).startswith("No setting meets the goal (least GPU time with a p95 wait")


@pytest.mark.parametrize(
    ("goal", "words"),
    [
        ({"metric": "cold", "limit": 0.2, "wait_value": 1.0}, "at most 20 % of requests cold"),
        ({"metric": "p95", "limit": None, "wait_value": 2.0}, "a waiting second priced at 2 GPU-seconds"),
    ],
    ids=["cold", "priced"],
)
def test_goals_in_words(found: dict[str, Any], goal: dict[str, Any], words: str) -> None:
    assert words in search_html({**found, "goal": goal, "confidence": None})


def test_labels_cannot_inject_markup(found: dict[str, Any]) -> None:
    label = '<img src=x onerror=alert(1)>"&'
    parsed = inventory(search_html({**found, "trace": {**found["trace"], "label": label}}))
    assert "img" not in parsed.tags
    assert label in "".join(parsed.text)
