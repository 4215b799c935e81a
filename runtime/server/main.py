"""`coldframe serve`: one replica of the HTTP service with its worker."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from loader.errors import ArtifactError
from runtime.logs import configure
from runtime.server.app import build_app
from runtime.server.bundle import OpenBundle, open_prepared_directory
from runtime.server.config import INTERRUPTED_POLICIES, LOG_MODES, ServerConfig
from runtime.server.fetch import Fetcher
from runtime.server.service import Service
from runtime.timeline import process_start_ns

CONNECTION_CLOSE_S = 5

log = logging.getLogger(__name__)


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
    parser = argparse.ArgumentParser(prog="coldframe serve", description=__doc__)
    parser.add_argument("--bundle", type=Path, help="prepared directory")
    parser.add_argument("--state", type=Path, help="job database and results (default: ./coldframe-state)")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int, help="0 picks a free one and prints it")
    parser.add_argument("--name", dest="served_name", help="model name for clients")
    parser.add_argument(
        "--interrupted", choices=INTERRUPTED_POLICIES, help="jobs that ran when something died"
    )
    parser.add_argument(
        "--allow-unauthenticated", action="store_const", const=True, help="serve without API keys"
    )
    parser.add_argument(
        "--allow-url-inputs", action="store_const", const=True, help="fetch keyframes from addresses"
    )
    parser.add_argument("--log", choices=LOG_MODES)
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
    service = Service(config, opener=opener, fetcher=fetcher)
    options: dict[str, Any] = {
        "host": config.host,
        "port": config.port,
        "http": "h11",
        "loop": "asyncio",
        "ws": "none",
    }
    server = _Server(
        uvicorn.Config(
            build_app(service), **options, log_config=None, access_log=False, server_header=False, lifespan="on",
            timeout_graceful_shutdown=CONNECTION_CLOSE_S, timeout_keep_alive=75, h11_max_incomplete_event_size=64 * 1024,
        ),
        service,
    )  # fmt: skip
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    await server.serve()
    return 0 if server.started else 1


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
        port = self.servers[0].sockets[0].getsockname()[1]
        began_ns = process_start_ns()
        ready_s = (time.monotonic_ns() - began_ns) / 1e9 if began_ns is not None else 0.0
        self._service.metrics.set("h3_server_ready_seconds", ready_s)
        log.info("listening", extra={"host": self.config.host, "port": port, "ready_s": round(ready_s, 3)})

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
