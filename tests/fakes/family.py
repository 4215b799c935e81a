"""A family that checks a request only as far as the HTTP tests need it, and a way to run the service with it.

`python tests/fakes/family.py --bundle DIR …` is `coldframe serve` with this family.
"""

from __future__ import annotations

import base64
import io
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loader.errors import RequestError
from runtime.family import MediaPlan, Prepared

KNOWN = {
    "prompt",
    "seed",
    "num_frames",
    "seconds",
    "width",
    "height",
    "size",
    "first_frame",
    "last_frame",
    "num_inference_steps",
}


class FakeFamily:
    """Accepts the fields of `KNOWN`, decodes pictures with Pillow."""

    capabilities: Any = None

    def parse(self, body: Mapping[str, object], resolve_image: Any = None) -> dict[str, object]:
        for name in body:
            if name not in KNOWN:
                raise RequestError("unknown field", where=name, expected=", ".join(sorted(KNOWN)))
        if not isinstance(body.get("prompt"), str) or not body["prompt"]:
            raise RequestError("must be text and not empty", where="prompt")
        if not isinstance(body.get("num_frames", 124), int):
            raise RequestError("must be an integer", where="num_frames")
        return dict(body)

    def prepare(self, request: Any) -> Prepared:
        from PIL import Image

        for name in ("first_frame", "last_frame"):
            if request.get(name):
                try:
                    Image.open(io.BytesIO(base64.b64decode(request[name].split(",")[1]))).load()
                except OSError as error:
                    raise RequestError("cannot decode the image", where=name, http_status=422) from error
        width, height = (int(part) for part in request.get("size", "1344x768").split("x"))
        media = MediaPlan(width, height, int(request.get("num_frames", 124)), 24, 32000)
        return Prepared(
            request, "t2va/base-8", media, {"task": "t2va", "seed": request["seed"], "num_inference_steps": 8}
        )


def open_fake(directory: Path) -> Any:
    from runtime.server.bundle import OpenBundle

    model = {"family": "minimax_h3", "variant": "base", "tasks": ["t2va", "fl2va"], "schedules": []}
    return OpenBundle(FakeFamily(), "bundle_0123456789abcdef", model)  # type: ignore[arg-type]


def fetcher_for_tests() -> Any:
    """A guarded fetcher that may also reach the addresses in `FAKE_ALLOWED_ADDRESSES` and pins names from `FAKE_NAMES`."""
    from runtime.server.fetch import Fetcher, is_global_address, resolve_name

    allowed = os.environ.get("FAKE_ALLOWED_ADDRESSES", "").split(",")
    names = dict(pair.split("=") for pair in os.environ.get("FAKE_NAMES", "").split(",") if pair)

    def resolve(host: str, port: int) -> list[str]:
        return [names[host]] if host in names else resolve_name(host, port)

    return Fetcher(
        True,
        30 << 20,
        resolve=resolve,
        is_allowed=lambda address: address in allowed or is_global_address(address),
    )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from runtime.server.main import config_from_arguments, serve

    config = config_from_arguments(sys.argv[1:])
    sys.exit(
        serve(config, opener=open_fake, fetcher=fetcher_for_tests() if config.allow_url_inputs else None)
    )
