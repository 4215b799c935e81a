"""Keyframes of a request as checked bytes: uploads, data URIs and fetched addresses meet here, with one set of rules.

The format is decided from the content. Decoding happens later, in the family's preparation, with its own limits.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass

from runtime.server.body import Upload
from runtime.server.errors import ApiError
from runtime.server.fetch import Fetcher

ACCEPTED = "PNG, JPEG, WebP"
MAX_DATA_URI_HEADER = 128
_DATA_URI_HEADER = re.compile(r"data:image/(png|jpeg|jpg|webp);base64", re.IGNORECASE)
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

    def data_uri(self) -> str:
        return f"data:image/{self.kind};base64,{base64.b64encode(self.data).decode()}"


def load_picture(source: Upload | str, where: str, max_bytes: int, fetcher: Fetcher) -> Picture:
    """Bytes of a keyframe. Blocks while an address is fetched.

    Raises: ApiError naming `where`: 400 malformed or not allowed, 413 too large, 422 not an accepted picture.
    """
    if isinstance(source, Upload):
        data = source.data
    elif source[:5].lower() == "data:":
        data = _decode_data_uri(source, where, max_bytes)
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
    return Picture(data, kind)


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


def _decode_data_uri(uri: str, where: str, max_bytes: int) -> bytes:
    header, comma, payload = uri.partition(",")

    def refuse(problem: str) -> ApiError:
        return ApiError(f"malformed data: uri: {problem}", where=where, code="invalid_data_uri")

    if not comma:
        raise refuse("no comma before the base64 payload")
    if len(header) > MAX_DATA_URI_HEADER:
        raise refuse("its header is too long")
    if _DATA_URI_HEADER.fullmatch(header) is None:
        raise refuse("only data:image/png, image/jpeg and image/webp in base64 are taken")
    if len(payload) > max_bytes * 4 // 3 + 4:
        raise ApiError(
            "the image is too large",
            status=413,
            code="file_too_large",
            where=where,
            expected=f"{max_bytes} bytes",
        )
    try:
        data = base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError):
        raise refuse("the payload is not base64") from None
    if not data:
        raise refuse("the payload is empty")
    return data
