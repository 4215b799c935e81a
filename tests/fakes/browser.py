"""A headless Chromium, driven through chromedriver's plain HTTP interface (W3C WebDriver). Standard library only."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.fakes.service import until

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--autoplay-policy=no-user-gesture-required",
)


class Browser:
    """One session. Elements are found by CSS selector."""

    def __init__(self, port: int, session: str) -> None:
        self._base = f"http://127.0.0.1:{port}/session/{session}"

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return exchange(method, f"{self._base}{path}", body)

    def open(self, url: str) -> None:
        self.call("POST", "/url", {"url": url})

    def script(self, code: str, *arguments: Any) -> Any:
        return self.call("POST", "/execute/sync", {"script": code, "args": list(arguments)})

    def find(self, selector: str) -> str:
        return str(self.call("POST", "/element", {"using": "css selector", "value": selector})[ELEMENT])

    def type(self, selector: str, text: str) -> None:
        self.call("POST", f"/element/{self.find(selector)}/value", {"text": text})

    def keys(self, text: str) -> None:
        """Press keys, one after the other, wherever the focus is."""
        actions = [{"type": kind, "value": key} for key in text for kind in ("keyDown", "keyUp")]
        self.call("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def click(self, selector: str) -> None:
        self.call("POST", f"/element/{self.find(selector)}/click", {})

    def text(self, selector: str) -> str:
        return str(self.call("GET", f"/element/{self.find(selector)}/text"))

    def resize(self, width: int, height: int) -> None:
        self.call("POST", "/window/rect", {"width": width, "height": height})

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("GET", "/screenshot")))


def exchange(method: str, url: str, body: dict[str, Any] | None = None) -> Any:
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["value"]


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """Start chromedriver and a browser with a profile of its own; both end with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    driver = subprocess.Popen(
        ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: _is_up(port), "chromedriver answers")
        options = {
            "binary": "/usr/bin/chromium",
            "args": [*FLAGS, f"--user-data-dir={profile}", "--window-size=1280,1400"],
        }
        capabilities = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}
        session = exchange("POST", f"http://127.0.0.1:{port}/session", capabilities)["sessionId"]
        browser = Browser(port, session)
        try:
            yield browser
        finally:
            browser.call("DELETE", "")
    finally:
        driver.terminate()
        driver.wait(20)


def _is_up(port: int) -> bool:
    with contextlib.suppress(OSError):
        return bool(exchange("GET", f"http://127.0.0.1:{port}/status")["ready"])
    return False
