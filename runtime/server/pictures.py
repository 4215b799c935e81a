"""Keyframes of a request as checked bytes: uploads, data URIs and fetched addresses meet here, with one set of rules.

The format is decided from the content. Decoding happens later, in the family's preparation, with its own limits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from loader.errors import RequestError
from runtime.media.images import ImageLimits, read_header
from runtime.media.sources import read_image_source
from runtime.server.body import Upload
from runtime.server.errors import ApiError
from runtime.server.fetch import Fetcher

MAX_PIXELS, MAX_SIDE = 33_000_000, 8192
FORMATS = ("PNG", "JPEG", "WebP")
# How a refusal of the reader is told: its status → ours, and our code.
_REFUSALS = {413: (413, "image_too_large"), 415: (422, "unsupported_image"), 422: (422, "invalid_image")}


@dataclass(frozen=True)
class Picture:
    """An encoded picture of an accepted format; `kind` is png, jpeg or webp."""

    data: bytes
    kind: str


def load_picture(source: Upload | str, where: str, max_bytes: int, fetcher: Fetcher) -> Picture:
    """Bytes of a keyframe. Blocks while an address is fetched.

    Raises: RequestError naming `where`: 400 malformed or not allowed, 413 too large, 422 not an accepted picture.
    """
    if isinstance(source, Upload):
        data = source.data
    elif source[:5].lower() == "data:":
        data = read_image_source(source, where, max_bytes)
    elif re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*:", source):
        data = fetcher.fetch(source, where)
    else:
        raise ApiError(
            "is neither an upload, a data: uri nor a url; a path on the server is never read", where=where,
            code="invalid_image_reference", expected="data:image/png;base64,… or an http(s) url",
        )  # fmt: skip
    if len(data) > max_bytes:
        raise ApiError(
            "the image is too large",
            status=413,
            code="file_too_large",
            where=where,
            expected=f"{max_bytes} bytes",
        )
    limits = ImageLimits(max_bytes, MAX_PIXELS, MAX_SIDE, FORMATS, is_single=True)
    try:
        header = read_header(data, limits, where)
    except RequestError as refusal:
        status, code = _REFUSALS[refusal.http_status]
        raise ApiError(
            refusal.message,
            status=status,
            code=code,
            where=where,
            found=refusal.found,
            expected=refusal.expected,
        ) from refusal
    return Picture(data, header.kind.lower())
