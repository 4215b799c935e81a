"""The examples of README.md and docs/api.md, as written, against a real server process."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from runtime.server.mp4 import check_container
from tests.fakes.service import KEY, ROOT, ServiceProcess

API = (ROOT / "docs/api.md").read_text()
BLOCKS = [
    block for block in re.findall(r"```bash\n(.*?)```", API, re.DOTALL) if "coldframe serve" not in block
]
README = (ROOT / "README.md").read_text()
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
PICTURE = ROOT / "tests/cases/inputs/images/good.png"


def test_the_curl_examples_in_their_order(service: ServiceProcess, tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(PICTURE.read_bytes())
    environ = {**os.environ, "URL": service.url, "KEY": KEY}
    outputs = []
    for block in BLOCKS:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block],
            env=environ,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert '"error": {' not in done.stdout
        assert '"error":{' not in done.stdout
        outputs.append(done.stdout)
    assert '"status":' in outputs[0]
    assert '"task":"fl2va"' in outputs[1]
    assert "event: completed" in outputs[2]
    assert check_container(tmp_path / "out.mp4") is None
    assert "HTTP/1.1 200" in (tmp_path / "headers.txt").read_text()


def test_the_curl_example_of_the_readme(service: ServiceProcess, tmp_path: Path) -> None:
    (block,) = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    environ = {**os.environ, "URL": service.url, "KEY": KEY}
    subprocess.run(["bash", "-euo", "pipefail", "-c", block], env=environ, cwd=tmp_path, check=True)
    assert check_container(tmp_path / "out.mp4") is None


def test_every_link_of_the_readme_and_the_pages_exists() -> None:
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.filterwarnings("ignore:The Sora API is scheduled:DeprecationWarning")
@pytest.mark.parametrize("example", [*PYTHON.findall(README), *PYTHON.findall(API)], ids=["readme", "api"])
def test_the_python_example(
    service: ServiceProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: str
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"URL": service.url, "KEY": KEY}
    exec(example, names)
    names["client"].close()  # type: ignore[attr-defined]
    assert check_container(tmp_path / "out.mp4") is None


def test_every_setting_and_route_is_documented() -> None:
    import dataclasses

    from runtime.server.app import ROUTES
    from runtime.server.config import ServerConfig

    deploy = (ROOT / "docs/deploy.md").read_text()
    internal = {
        "bundle",
        "api_key_hashes",
        "worker_command",
        "worker_args",
        "sync_timeout_s",
        "restart_backoff_s",
        "restart_backoff_max_s",
        "poll_after_ms",
    }
    for field in dataclasses.fields(ServerConfig):
        assert field.name in internal or f"_{field.name.upper()}`" in deploy, field.name
    paths = {route.path.replace("{video_id:video}", "{id}").replace("{model}", "{id}") for route in ROUTES}
    aliases = {
        "/",
        "/v1/model_info",
        "/server_info",
        "/liveness",
        "/ping",
        "/health-check",
        "/readyz",
        "/openapi.json",
    }
    unsupported = re.compile(r"edits|extensions|characters|remix")
    for path in paths - aliases:
        assert unsupported.search(path) or path.removeprefix("/v1/videos/{id}") in API, path
