"""Where a request's picture comes from: raw bytes, a data URI, or an https URL that somebody else fetches.

A request never names a path of this machine. Nothing here opens a connection: without a `fetch` function URLs are
refused; with one, only plain https URLs are handed to it (address checks after every redirect, byte and time limits
are its job). Messages never repeat a payload. Standard library only.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from urllib.parse import urlsplit

from loader.errors import RequestError

DATA_URI_TYPES = ("image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif")
_MAX_HEADER = 64  # "data:image/jpeg;base64" and no parameters worth having
_FORMS = "data:image/png;base64,… (also jpeg, webp, gif)"


def read_image_source(
    value: object, where: str, max_bytes: int, fetch: Callable[[str], bytes] | None = None
) -> bytes:
    """The encoded picture that `value` stands for.

    Args:
        value: bytes (uploads, command line) or a string from the request.
        max_bytes: upper bound for every form; a data URI is refused by its length before it is decoded.
        fetch: turns an https URL into bytes or raises RequestError; None refuses URLs.

    Raises: RequestError naming `where`.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return _bounded(bytes(value), where, max_bytes)
    if not isinstance(value, str):
        raise RequestError("not an image", where=where, found=type(value).__name__, expected=_FORMS)
    if value[:5].lower() == "data:":
        return _bounded(_decode_data_uri(value, where, max_bytes), where, max_bytes)
    return _bounded(_fetch(value, where, fetch), where, max_bytes)


def _decode_data_uri(uri: str, where: str, max_bytes: int) -> bytes:
    header, comma, payload = uri.partition(",")
    if len(header) > _MAX_HEADER or not comma:
        raise RequestError("the data URI has no base64 image part", where=where, expected=_FORMS)
    media_type, *parameters = header[5:].lower().split(";")
    if media_type not in DATA_URI_TYPES:
        raise RequestError(
            "the data URI is not of an accepted image type", where=where, found=repr(media_type),
            expected=", ".join(DATA_URI_TYPES), http_status=415,
        )  # fmt: skip
    if parameters != ["base64"]:
        raise RequestError("the data URI must be base64", where=where, found=repr(header), expected=_FORMS)
    if len(payload) > (max_bytes + 2) // 3 * 4:
        raise RequestError(
            "the image is too large", where=where, found=f"a data URI of {len(payload)} characters",
            expected=f"at most {max_bytes} bytes decoded", http_status=413,
        )  # fmt: skip
    try:
        data = base64.b64decode(payload, validate=True)
    except ValueError:  # binascii.Error is one; non-ASCII characters raise another
        raise RequestError("the data URI is not valid base64", where=where, expected=_FORMS) from None
    if not data:
        raise RequestError("the data URI holds an empty image", where=where, expected=_FORMS)
    return data


def _fetch(value: str, where: str, fetch: Callable[[str], bytes] | None) -> bytes:
    scheme = re.match(r"[A-Za-z][A-Za-z0-9+.-]*(?=:)", value)
    if scheme is None:
        raise RequestError(
            "neither a data URI nor a URL; a path of this machine is never opened",
            where=where,
            expected=_FORMS if fetch is None else f"{_FORMS} or https://…",
        )
    if fetch is None or scheme[0].lower() != "https":
        raise RequestError(
            "a URL of this scheme is not allowed here",
            where=where,
            found=scheme[0].lower()[:20],
            expected=_FORMS if fetch is None else f"{_FORMS} or https://…",
        )
    _check_url(value, where)
    return fetch(value)


def _check_url(url: str, where: str) -> None:
    try:
        parts = urlsplit(url)
        host, has_user, _ = parts.hostname, parts.username is not None, parts.port
    except ValueError:
        host, has_user = None, False
    if not host or has_user or not url.isascii() or re.search(r"[\x00-\x20\x7f\\]", url):
        raise RequestError(
            "the URL is malformed", where=where,
            expected="https://host/path: a host, no user name, no spaces or control characters",
        )  # fmt: skip


def _bounded(data: bytes, where: str, max_bytes: int) -> bytes:
    if len(data) > max_bytes:
        raise RequestError(
            "the image file is too large", where=where, found=f"{len(data)} bytes",
            expected=f"at most {max_bytes} bytes", http_status=413,
        )  # fmt: skip
    return data
