"""The command itself: flags over variables, and where it listens."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from loader.errors import CapabilityError
from runtime.server.main import config_from_arguments, listen
from tests.fakes.service import ROOT, is_running


def test_flags_win_and_the_rest_goes_to_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLDFRAME_API_KEYS", "key")
    monkeypatch.setenv("COLDFRAME_SERVE_PORT", "9000")
    monkeypatch.setenv("COLDFRAME_SERVE_HOST", "0.0.0.0")
    config = config_from_arguments(
        ["--bundle", "b", "--port", "9001", "--ranks", "2", "--", "--device", "cpu"]
    )
    assert (config.host, config.port, config.ranks) == ("0.0.0.0", 9001, 2)
    assert config.worker_args == ("--device", "cpu")


def is_here(address: str, family: int) -> bool:
    """A host may have the family and no such loopback."""
    with socket.socket(family) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def test_an_address_that_the_host_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    here = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))
    elsewhere = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0))  # for documentation, nobody's
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [elsewhere, here, elsewhere])
    (listener,) = listen("name", 0)
    assert listener.getsockname()[0] == "127.0.0.1"
    listener.close()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [elsewhere])
    with pytest.raises(CapabilityError, match="name:0: cannot listen here"):
        listen("name", 0)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", ""], ids=["address", "name", "all"])
def test_every_listener_takes_connections(host: str) -> None:
    listeners = listen(host, 0)
    try:
        assert listeners
        for listener in listeners:
            family, port = listener.family, listener.getsockname()[1]
            if is_here(loopback := "::1" if family == socket.AF_INET6 else "127.0.0.1", family):
                with socket.socket(family) as client:
                    client.connect((loopback, port))
    finally:
        for listener in listeners:
            listener.close()


def test_a_taken_port_is_named_and_nothing_stays_bound() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(CapabilityError, match=rf"127\.0\.0\.1:{port}: cannot listen here") as refusal:
            listen("127.0.0.1", port)
    assert refusal.value.exit_code == 4
    for listener in listen("127.0.0.1", port):  # free again
        listener.close()


def test_two_services_cannot_pass_with_one_port() -> None:
    """Neither has accepted a connection, as in the moment between the opening of the socket and the start of the server."""
    (first,) = listen("127.0.0.1", 0)
    with first, pytest.raises(CapabilityError, match="cannot listen here; found Address already in use"):
        listen("127.0.0.1", first.getsockname()[1])


SERVER_THAT_DOES_NOT_START = """
import asyncio, pathlib, sys, uvicorn
from runtime.server.config import ServerConfig
from runtime.server.main import serve

async def startup(self, sockets=None):
    await self.lifespan.startup()
    await asyncio.sleep({pause_s})
    raise OSError("no socket")

uvicorn.Server.startup = startup
here = pathlib.Path(sys.argv[1])
command = (sys.executable, "tests/fakes/worker.py")
serve(ServerConfig(bundle=here, state=here / "state", port=0, allow_unauthenticated=True, worker_command=command))
"""


@pytest.mark.parametrize("pause_s", [0, 0.5], ids=["the worker is being started", "the worker runs"])
def test_a_server_that_does_not_start_ends_with_its_worker(pause_s: float, tmp_path: Path) -> None:
    worker_log = tmp_path / "worker.log"
    program = SERVER_THAT_DOES_NOT_START.format(pause_s=pause_s)
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False,
        timeout=60, env={**os.environ, "FAKE_LOG": str(worker_log)},
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.endswith("OSError: no socket\n")
    lines = worker_log.read_text().splitlines() if worker_log.exists() else []
    started = [int(line.split()[1]) for line in lines if line.startswith("start ")]
    assert not any(map(is_running, started))


def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(CapabilityError, match=r"203\.0\.113\.1:1: cannot listen here"):
        listen("203.0.113.1", 1)
