"""`coldframe serve`: one replica of the HTTP service with its worker."""

from __future__ import annotations

import argparse
import asyncio
import errno
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from loader.errors import ArtifactError, CapabilityError
from runtime.logs import configure
from runtime.server.app import build_app
from runtime.server.bundle import OpenBundle, open_prepared_directory
from runtime.server.config import INTERRUPTED_POLICIES, LOG_MODES, ServerConfig
from runtime.server.fetch import Fetcher
from runtime.server.service import Service
from runtime.timeline import process_start_ns

CONNECTION_CLOSE_S = 5
BACKLOG = 2048

log = logging.getLogger(__name__)

_ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # names resolve to IPv6 on hosts that have none


def main(argv: Sequence[str]) -> int:
    """Run until SIGTERM or SIGINT. Returns the exit code."""
    config = config_from_arguments(argv)
    if not (config.bundle / "manifest.json").is_file():
        raise ArtifactError(
            "no manifest.json here", where=str(config.bundle), hint="make it with `coldframe prepare`"
        )
    return serve(config)


def config_from_arguments(argv: Sequence[str]) -> ServerConfig:
    """Flags over `COLDFRAME_SERVE_*` variables over defaults; what follows `--` goes to the worker."""
    argv = list(argv)
    split = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        prog="coldframe serve",
        description="Serve the HTTP API: one replica with its worker, until SIGTERM or SIGINT.",
        epilog="Every setting is also a variable, COLDFRAME_SERVE_… (docs/deploy.md); a flag wins. Bearer keys come from "
        "COLDFRAME_API_KEYS or COLDFRAME_API_KEYS_SHA256 only. What follows `--` goes to the worker: `-- --device cpu`.",
    )
    parser.add_argument("--bundle", type=Path, help="prepared directory (or COLDFRAME_BUNDLE)")
    parser.add_argument("--state", type=Path, help="job database and results (default: ./coldframe-state)")
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1; 0.0.0.0 for all)")
    parser.add_argument("--port", type=int, help="default: 8000; 0 picks a free one and logs it")
    parser.add_argument("--name", dest="served_name", help="model name for clients (default: the family's)")
    parser.add_argument("--ranks", type=int, help="GPUs that work together on each request (default: 1)")
    parser.add_argument(
        "--interrupted", choices=INTERRUPTED_POLICIES,
        help="what becomes of a job that ran when something died (default: fail)",
    )  # fmt: skip
    parser.add_argument(
        "--allow-unauthenticated", action="store_const", const=True, help="serve without API keys"
    )
    parser.add_argument(
        "--allow-url-inputs", action="store_const", const=True, help="fetch keyframes from http(s) addresses"
    )
    parser.add_argument("--log", choices=LOG_MODES, help="default: text on a terminal, JSON lines elsewhere")
    flags = vars(parser.parse_args(argv[:split]))
    worker_args = tuple(argv[split + 1 :]) or None
    return ServerConfig.from_environment(os.environ, worker_args=worker_args, **flags)


def serve(
    config: ServerConfig,
    *,
    opener: Callable[[Path], OpenBundle] = open_prepared_directory,
    fetcher: Fetcher | None = None,
) -> int:
    """Bind, serve, drain, leave."""
    configure(config.log)
    return asyncio.run(_serve(config, opener, fetcher))


async def _serve(config: ServerConfig, opener: Callable[[Path], OpenBundle], fetcher: Fetcher | None) -> int:
    listeners = listen(config.host, config.port)  # before a worker is started for nothing
    try:
        service = Service(config, opener=opener, fetcher=fetcher)
        try:
            return await _serve_on(listeners, service)
        finally:
            await service.close()  # the server does it only where it came to serve
    finally:
        for listener in listeners:
            listener.close()


async def _serve_on(listeners: list[socket.socket], service: Service) -> int:
    server = _Server(
        uvicorn.Config(
            build_app(service), http="h11", loop="asyncio", ws="none", log_config=None, access_log=False,
            server_header=False, lifespan="on", backlog=BACKLOG, timeout_graceful_shutdown=CONNECTION_CLOSE_S, timeout_keep_alive=75,
            h11_max_incomplete_event_size=64 * 1024,
        ),
        service,
    )  # fmt: skip
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    await server.serve(listeners)
    return 0 if server.started else 1


def listen(host: str, port: int) -> list[socket.socket]:
    """Listening sockets for every address of a name that this host has. Raises: CapabilityError: unknown name, no such
    address, or the port is taken."""
    bound: list[socket.socket] = []
    absent: OSError | None = None
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            try:
                bound.append(_listening(family, kind, protocol, address))
            except OSError as cause:
                if cause.errno not in _ABSENT:
                    raise
                absent = cause
        if not bound and absent is not None:
            raise absent
    except OSError as cause:
        for listener in bound:
            listener.close()
        raise CapabilityError(
            "cannot listen here", where=f"{host}:{port}", found=cause.strerror,
            hint="choose another --host or --port (0 picks a free one)",
        ) from cause  # fmt: skip
    return bound


def _listening(family: int, kind: int, protocol: int, address: tuple[Any, ...]) -> socket.socket:
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)  # until then another one that allows reuse may bind the port, too
    except OSError:
        listener.close()
        raise
    return listener


class _Server(uvicorn.Server):
    """A server whose first signal drains and whose second one ends it."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: Any = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if not self.started:
            return
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        began_ns = process_start_ns()
        ready_s = (time.monotonic_ns() - began_ns) / 1e9 if began_ns is not None else 0.0
        self._service.metrics.set("h3_server_ready_seconds", ready_s)
        log.info(
            "listening", extra={"url": f"http://{shown}:{port}/", "port": port, "ready_s": round(ready_s, 3)}
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is not None and self._draining is None and not self.should_exit:
            self._loop.call_soon_threadsafe(self._begin_drain, sig)
        else:
            self.should_exit = True
            self.force_exit = sig == signal.SIGINT

    def _begin_drain(self, sig: int) -> None:
        if self._draining is None:
            log.info("draining", extra={"signal": signal.Signals(sig).name})
            self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        await self._service.engine.drain(self._service.config.drain_timeout_s)
        self.should_exit = True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
