"""The web page, in a real browser: from a prompt to a playing video, with mouse, keyboard and drop."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.fakes.browser import Browser, chromium
from tests.fakes.service import KEY, ROOT, ServiceProcess, until

PAGE = ROOT / "runtime/server/page/index.html"
TAB, ENTER = "\ue004", "\ue007"


class Page(HTMLParser):
    """Elements with their attributes, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def page() -> Page:
    parsed = Page()
    parsed.feed(PAGE.read_text())
    return parsed


def test_the_page_loads_nothing_from_elsewhere(page: Page) -> None:
    for tag, attributes in page.elements:
        for name in ("src", "href", "action"):
            value = attributes.get(name) or ""
            assert value.startswith(("#", "data:")) or not value, (tag, value)
    assert "http://" not in PAGE.read_text().replace("http://www.w3.org/2000/svg", "")


def test_every_control_has_a_name_and_the_states_are_announced(page: Page) -> None:
    labelled = {attributes.get("for") for tag, attributes in page.elements if tag == "label"}
    for tag, attributes in page.elements:
        if tag in ("input", "textarea", "select"):
            assert attributes.get("id") in labelled or attributes.get("aria-label"), attributes
    attributes = {a["id"]: a for _, a in page.elements if a.get("id")}
    assert attributes["said"]["aria-live"] == "polite"
    assert attributes["error"]["role"] == "alert"
    assert attributes["progress"]["aria-label"]
    assert next(a for tag, a in page.elements if tag == "html")["lang"] == "en"
    assert next(tag for tag, _ in page.elements if tag in ("h1", "h2", "h3")) == "h1"


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with chromium(tmp_path / "profile") as browser:
        yield browser


@pytest.mark.slow
def test_from_prompt_to_playing_video(service: ServiceProcess, browser: Browser, tmp_path: Path) -> None:
    service.gate.unlink(missing_ok=True)
    browser.open(service.url)
    assert "enter an API key" in until(lambda: browser.text("#queue"), "the page asks for a key")
    browser.type("#key", KEY + TAB)
    until(lambda: "queued" in browser.text("#queue"), "the key is accepted")
    picture = base64.b64encode((ROOT / "tests/cases/inputs/images/good.png").read_bytes()).decode()
    browser.script(DROP, picture)
    until(
        lambda: browser.script("return document.querySelectorAll('.drop img').length") == 1, "the drop shows"
    )
    browser.type("#prompt", "steam rises from a cup [gate@4]")
    browser.script("document.getElementById('send').focus()")
    browser.keys(ENTER)
    until(lambda: "step 3 of 8" in browser.text("#said"), "the phase is live")
    browser.screenshot(tmp_path / "running.png")
    assert browser.script("return document.getElementById('progress').value") > 30
    assert "denoising" in browser.text("[aria-current=step]")
    service.gate.touch()
    until(
        lambda: browser.script("const v = document.querySelector('video'); return v && v.currentTime > 0.1"),
        "it plays",
    )
    until(
        lambda: browser.script("return document.querySelectorAll('#waterfall rect').length") >= 6,
        "the waterfall",
    )
    assert "Finished" in browser.text("#said")
    assert browser.script("return document.querySelector('video').videoWidth") == 192
    assert "first DiT entry" in browser.text("#headline")
    assert "completed" in browser.text("#list")
    browser.screenshot(tmp_path / "finished.png")
    assert (tmp_path / "finished.png").stat().st_size > 20_000
    log = browser.call("POST", "/se/log", {"type": "browser"})
    assert [entry for entry in log if "401" not in entry["message"] and entry["level"] == "SEVERE"] == []
    service.gate.unlink()


@pytest.mark.slow
def test_refusals_are_told_and_a_job_can_be_cancelled(service: ServiceProcess, browser: Browser) -> None:
    service.gate.unlink(missing_ok=True)
    browser.open(service.url)
    browser.type("#key", KEY + TAB)
    browser.click("#send")
    assert "write a prompt" in browser.text("#error")
    browser.type("#prompt", "x [gate@2]")
    browser.script("document.getElementById('seconds').value = '99'")
    browser.click("#send")
    until(lambda: "4 … 15 s" in browser.text("#error"), "the limit is told")
    browser.script("document.getElementById('seconds').value = '5'")
    browser.click("#send")
    until(lambda: "step 1 of 8" in browser.text("#said"), "it runs")
    browser.click("#cancel")
    until(lambda: "cancelled" in browser.text("#stage"), "it says so")


DROP = """
const bytes = Uint8Array.from(atob(arguments[0]), (c) => c.charCodeAt(0));
const transfer = new DataTransfer();
transfer.items.add(new File([bytes], "cup.png", { type: "image/png" }));
const drop = document.querySelector("[data-name=first_frame]");
for (const kind of ["dragenter", "dragover", "drop"]) drop.dispatchEvent(new DragEvent(kind, { dataTransfer: transfer, bubbles: true, cancelable: true }));
"""
