"""The container description for other hosts, and bytecode as the images hold it."""

from __future__ import annotations

import http.server
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path

from runtime.server.config import ServerConfig, worker_environment
from runtime.settings import settings_from_environment
from tests.fakes.service import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()
PACKAGES = ("prepare", "runtime", "loader", "kernels", "manifests")
UNCHECKED_HASH = 0b01  # flags word of a .pyc: hash-based, source never looked at (PEP 552)


def environment() -> dict[str, str]:
    text = DOCKERFILE.replace("\\\n", " ")
    final = text[text.rindex("\nFROM ") :]
    words = [word for line in re.findall(r"^ENV (.*)$", final, re.MULTILINE) for word in shlex.split(line)]
    return dict(word.split("=", 1) for word in words)


def test_the_variables_of_the_image_are_settings_of_ours() -> None:
    environ = {**environment(), "COLDFRAME_API_KEYS": "key"}
    config = ServerConfig.from_environment(environ)
    assert (str(config.bundle), str(config.state), config.host, config.port) == (
        "/weights",
        "/state",
        "0.0.0.0",
        8000,
    )
    assert settings_from_environment(worker_environment(environ)).bundle == "/weights"


def test_everything_that_is_copied_exists_and_nobody_is_root() -> None:
    sources = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    assert all((ROOT / name).exists() for line in sources for name in line.split())
    assert {name for line in sources for name in line.split()} >= set(PACKAGES)
    assert re.search(r"^USER (?!root)", DOCKERFILE, re.MULTILINE)
    assert 'ENTRYPOINT ["coldframe", "serve"]' in DOCKERFILE
    assert not re.search(
        r"KEY|TOKEN|SECRET", "\n".join(line for line in DOCKERFILE.splitlines() if not line.startswith("#"))
    )


def test_the_build_context_is_what_is_copied() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line.removeprefix("!") for line in lines if line.startswith("!")}
    sources = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    assert lines[1] == "*"
    assert kept == {name for line in sources for name in line.split()}
    assert "**/__pycache__" in lines  # bytecode of another Python would travel along


def test_versions_are_pinned_also_of_what_builds() -> None:
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    packages = re.search(r"pip install \\\n\s+(.+)", DOCKERFILE)
    assert packages is not None
    assert set(packages[1].split()) <= pinned
    assert "ENV PIP_CONSTRAINT=/src/constraints.txt " in DOCKERFILE  # holds for what builds as well
    assert "hatchling" in pinned
    assert all(
        ":latest" not in line and ":" in line for line in DOCKERFILE.splitlines() if line.startswith("FROM")
    )


def test_the_health_check_asks_the_configured_port() -> None:
    check = re.search(r"^\s+CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    assert check is not None
    program = json.loads(check[1])
    environ = {**os.environ, "COLDFRAME_SERVE_PORT": "1"}
    done = subprocess.run([sys.executable, *program[1:]], env=environ, capture_output=True, check=False)
    assert done.returncode != 0
    with http.server.HTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        environ["COLDFRAME_SERVE_PORT"] = str(server.server_port)
        subprocess.run([sys.executable, *program[1:]], env=environ, check=True)


class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_modules_are_compiled_so_that_no_start_looks_at_their_sources(tmp_path: Path) -> None:
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    command = [
        sys.executable,
        "-m",
        "compileall",
        "-q",
        "--invalidation-mode",
        "unchecked-hash",
        str(tmp_path),
    ]
    subprocess.run(command, check=True)
    modules = list(tmp_path.rglob("*.py"))
    assert len(modules) > 50
    for module in modules:
        compiled = module.parent / "__pycache__" / f"{module.stem}.{sys.implementation.cache_tag}.pyc"
        assert int.from_bytes(compiled.read_bytes()[4:8], "little") == UNCHECKED_HASH, module
