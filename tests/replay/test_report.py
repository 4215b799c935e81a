"""The HTML page: one file, no script, nothing from outside, every reference resolved; and the plots."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from scripts.replay.cli import main
from scripts.replay.findings import findings
from scripts.replay.plots import COLOURS
from scripts.replay.report import html_report

COMMAND = [
    "run",
    "--synthetic",
    "ref:rate=6,hours=8",
    "--startup",
    "70,7.2",
    "--policy",
    "multiple:2,zero",
    "--gpu-price",
    "0.001972",
]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("result") / "r.json"
    assert main([*COMMAND, "--json", str(path)]) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.fixture(scope="module")
def page(result: dict[str, Any]) -> str:
    return html_report(result)


class Inventory(HTMLParser):
    """Tags, ids, references and open elements of a page."""

    VOID = frozenset({"meta", "link", "br", "img", "hr", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            elif name in {"src", "href", "xlink:href", "data", "action", "poster"}:
                self.references.append(value or "")
            else:
                self.references += [f"#{found}" for found in re.findall(r"url\(#([^)]+)\)", value or "")]
            assert not name.startswith("on"), name

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def inventory(page: str) -> Inventory:
    found = Inventory()
    found.feed(page)
    return found


def test_page_is_well_formed_and_has_all_pictures(inventory: Inventory) -> None:
    assert inventory.open == []
    assert inventory.tags.count("svg") == 6
    assert inventory.tags.count("figcaption") == 6
    assert "script" not in inventory.tags


def test_page_asks_nothing_from_outside(page: str, inventory: Inventory) -> None:
    outside = [found for found in inventory.references if not found.startswith(("#", "data:,"))]
    assert outside == []
    assert re.search(r"@import|url\((?!#)", page) is None
    # Namespaces are names, not requests.
    addresses = set(re.findall(r"https?://[^\"' <]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


def test_every_reference_inside_the_page_resolves_to_one_element(inventory: Inventory) -> None:
    assert len(inventory.ids) == len(set(inventory.ids))
    wanted = {found[1:] for found in inventory.references if found.startswith("#")}
    assert wanted <= set(inventory.ids)


def test_page_says_what_a_fast_start_costs(inventory: Inventory, result: dict[str, Any]) -> None:
    text = " ".join(inventory.text)
    assert "What it costs: more requests are cold" in text
    assert "Cheapest retention at S = 7.2" in text
    for row in result["combinations"]:
        assert f"{row['gpu_hours']:,.1f}" in text
    for sentence in findings(result):
        assert sentence in text


def test_every_caption_names_trace_policy_startup_and_mode(page: str) -> None:
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", page)
    assert all("ref:rate=6,hours=8" in caption for caption in captions)
    shares = next(caption for caption in captions if caption.startswith("Where GPU time"))
    assert all(word in shares for word in ("multiple:2", "70 s, 7.2 s", "140 s", "bound", "newest-idle"))


def test_labels_from_a_trace_cannot_inject_markup(result: dict[str, Any]) -> None:
    label = '<img src=x onerror=alert(1)>"&'
    page = html_report({**result, "pictures": None, "trace": {**result["trace"], "label": label}})
    found = Inventory()
    found.feed(page)
    assert "img" not in found.tags
    assert label in "".join(found.text)


def test_colours_are_told_apart_in_grey() -> None:
    def grey(colour: str) -> float:
        red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
        return 0.299 * red + 0.587 * green + 0.114 * blue

    levels = sorted(grey(COLOURS[kind]) for kind in ("generating", "starting", "idle"))
    assert all(np.diff(levels) > 40)


def test_plots_are_pictures_with_something_on_them(result: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(result))
    assert main(["report", str(path), "--plots", str(tmp_path / "plots")]) == 0
    names = sorted(file.stem for file in (tmp_path / "plots").iterdir())
    assert names == ["bursts", "frontier", "shares", "waits", "workers", "zoom"]
    for name in names:
        with Image.open(tmp_path / "plots" / f"{name}.png") as picture:
            assert picture.width > 1000
            assert len(picture.convert("RGB").getcolors(1 << 24) or []) > 20
    assert not list(tmp_path.glob("*.part"))


def test_report_without_pictures_still_has_the_tables(result: dict[str, Any], tmp_path: Path) -> None:
    bare = {key: value for key, value in result.items() if key != "pictures"}
    (tmp_path / "r.json").write_text(json.dumps(bare))
    assert main(["report", str(tmp_path / "r.json"), "--out", str(tmp_path / "r.html")]) == 0
    found = Inventory()
    found.feed((tmp_path / "r.html").read_text("utf-8"))
    assert found.tags.count("svg") == 2
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.slow
def test_page_opens_in_chromium_without_error_or_request(page: str, tmp_path: Path) -> None:
    """Slow because a browser starts; the plain run checks the same page with a parser."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert browser is not None, "chromium is needed: apt-get install chromium"
    path = tmp_path / "report.html"
    path.write_text(page, "utf-8")
    log = tmp_path / "net.json"
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0", "--disable-background-networking",
         f"--user-data-dir={tmp_path / 'profile'}", f"--log-net-log={log}", "--virtual-time-budget=2000", "--dump-dom", path.as_uri()],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr
    assert done.stdout.count("<svg") == 6
    assert "Where GPU time goes" in done.stdout
    addresses = re.findall(r'"url":"([^"]+)"', log.read_text("utf-8", "replace"))
    asked = {address for address in addresses if address.startswith(("http", "ws", "ftp"))}
    # The browser itself may call home; the page may not.
    assert not {address for address in asked if "google" not in address and "gvt1" not in address}
