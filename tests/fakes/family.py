"""MiniMax-H3's request rules at the released sizes without a prepared directory, and the service run with them.

`python tests/fakes/family.py --bundle DIR …` is `coldframe serve` with this family. `FAKE_SCHEDULES` names the prepared
schedules (`t2va=fasth3-8,fl2va=base-49`). `FAKE_IMPORTS` is a file that collects when (Unix ns) which module of OpenTelemetry
was looked for; with `FAKE_NO_OTEL` they are not found.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TOKEN_LIMIT = 16_384


class FakeFamily:
    """The real `parse`, and a `prepare` that counts four characters as a token."""

    def __init__(self, schedules: Mapping[str, tuple[str, ...]]) -> None:
        from runtime.families.minimax_h3.capabilities import Capabilities
        from runtime.schedules import named_schedule
        from scripts.tiny_presets import preset

        prepared: Any = {
            task: tuple(named_schedule(name) for name in names) for task, names in schedules.items()
        }
        self.capabilities: Any = Capabilities(preset("full").model, prepared)

    def parse(self, body: Mapping[str, object], resolve_image: Any = None) -> Any:
        from runtime.families.minimax_h3.request import parse_request

        return parse_request(body, self.capabilities, resolve_image=resolve_image)

    def prepare(self, request: Any) -> Any:
        from loader.errors import RequestError
        from runtime.family import MediaPlan, Prepared

        tokens = len(request.prompt) // 4
        if tokens > TOKEN_LIMIT:
            raise RequestError(
                "too many tokens", where="prompt", found=tokens, expected=f"at most {TOKEN_LIMIT}"
            )
        media = MediaPlan(request.width, request.height, request.num_frames, 24, 32000)
        return Prepared(request, f"{request.task}/{request.schedule.name}", media, request.report())


class ImportLog:
    """Finder before all others that writes down what is looked for, and finds nothing."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] != "opentelemetry":
            return
        with Path(os.environ["FAKE_IMPORTS"]).open("a") as file:
            file.write(f"{time.time_ns()} {name}\n")
        if os.environ.get("FAKE_NO_OTEL"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def open_fake(directory: Path) -> Any:
    from runtime.server.bundle import OpenBundle

    text = os.environ.get("FAKE_SCHEDULES", "t2va=fasth3-8,fl2va=base-49")
    schedules = {task: (name,) for task, _, name in (pair.partition("=") for pair in text.split(","))}
    model = {"family": "minimax_h3", "variant": "base", "tasks": list(schedules), "schedules": []}
    return OpenBundle(FakeFamily(schedules), "bundle_0123456789abcdef", model)  # type: ignore[arg-type]


def fetcher_for_tests() -> Any:
    """A guarded fetcher that may also reach `FAKE_ALLOWED_ADDRESSES`, with the names of `FAKE_NAMES` pinned."""
    from runtime.server.fetch import Fetcher, is_global_address, resolve_name

    allowed = os.environ.get("FAKE_ALLOWED_ADDRESSES", "").split(",")
    names = dict(pair.split("=") for pair in os.environ.get("FAKE_NAMES", "").split(",") if pair)

    def resolve(host: str, port: int) -> list[str]:
        return [names[host]] if host in names else resolve_name(host, port)

    def is_allowed(address: str) -> bool:
        return address in allowed or is_global_address(address)

    return Fetcher(True, 30 << 20, resolve=resolve, is_allowed=is_allowed)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    if os.environ.get("FAKE_IMPORTS"):
        sys.meta_path.insert(0, ImportLog())  # type: ignore[arg-type]
    from runtime.server.main import config_from_arguments, serve

    config = config_from_arguments(sys.argv[1:])
    sys.exit(
        serve(config, opener=open_fake, fetcher=fetcher_for_tests() if config.allow_url_inputs else None)
    )
