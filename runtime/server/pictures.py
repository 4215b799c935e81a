"""Keyframes of a request as checked bytes: uploads, data URIs and fetched addresses meet here, with one set of rules.

The format is decided from the content. Decoding happens later, in the family's preparation, with its own limits.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass

from runtime.media.sources import read_image_source
from runtime.server.body import Upload
from runtime.server.errors import ApiError
from runtime.server.fetch import Fetcher

MAX_PIXELS, MAX_SIDE = 33_000_000, 8192
ACCEPTED = "PNG, JPEG, WebP"
_SIGNATURES: tuple[tuple[bytes, str], ...] = (
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"\xff\xd8\xff", "jpeg"),
    (b"GIF8", "gif"),
    (b"BM", "bmp"),
    (b"II*\x00", "tiff"),
    (b"MM\x00*", "tiff"),
    (b"\x00\x00\x00\x0cjP  ", "jpeg 2000"),
    (b"%PDF", "pdf"),
)


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
    if not data:
        raise ApiError("the image is empty", status=422, code="invalid_image", where=where)
    if len(data) > max_bytes:
        raise ApiError(
            "the image is too large",
            status=413,
            code="file_too_large",
            where=where,
            expected=f"{max_bytes} bytes",
        )
    kind = sniff(data)
    if kind not in ("png", "jpeg", "webp"):
        raise ApiError(
            "unsupported image format",
            status=422,
            code="unsupported_image",
            where=where,
            found=kind,
            expected=ACCEPTED,
        )
    _check_header(data, kind, where)
    return Picture(data, kind)


def _check_header(data: bytes, kind: str, where: str) -> None:
    """Refuse what would be large in memory, and animations, before anything is decoded. Damage is found later."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data), formats=[kind]) as image:
            width, height = image.size
            is_animated = kind != "jpeg" and getattr(image, "n_frames", 1) > 1
    except Image.DecompressionBombError:
        raise _too_many_pixels(where, "far too many pixels") from None
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as error:
        raise ApiError(
            "cannot decode this image",
            status=422,
            code="invalid_image",
            where=where,
            found=f"a damaged {kind} file",
        ) from error
    if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
        raise _too_many_pixels(where, f"{width}x{height} pixels")
    if is_animated:
        raise ApiError(
            "the image is animated", status=422, code="unsupported_image", where=where, expected="one picture"
        )


def _too_many_pixels(where: str, found: str) -> ApiError:
    allowed = f"{MAX_PIXELS} pixels, sides up to {MAX_SIDE}"
    return ApiError(
        "the image is too large",
        status=413,
        code="image_too_large",
        where=where,
        found=found,
        expected=allowed,
    )


def sniff(data: bytes) -> str:
    """Format from the first bytes, in words for people; `unknown` where nothing fits."""
    for signature, kind in _SIGNATURES:
        if data.startswith(signature):
            return kind
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    if data[4:8] == b"ftyp":
        brand = data[8:12].decode("latin-1")
        return (
            "heic"
            if brand in ("heic", "heix", "mif1", "hevc")
            else "avif"
            if brand == "avif"
            else f"iso media ({brand!r})"
        )
    text = data[:512].lstrip().lower()
    if text.startswith((b"<!doctype html", b"<html")):
        return "html"
    if text.startswith((b"<svg", b"<?xml")):
        return "svg"
    return "unknown"
