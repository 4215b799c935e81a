"""Request bodies: read under limits, parsed strictly. What comes out is a plain dictionary, whatever came in."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from runtime.server.config import ServerConfig
from runtime.server.errors import ApiError
from runtime.server.jobs import is_storage_error, storage_full

MAX_FIELDS, MAX_FILES = 64, 4
MAX_DEPTH = 32
MAX_JSON_PARTS = 200_000  # commas and brackets: bounds the objects that a body can become
DISCARD_S = 2.0
DISCARD_BYTES = 64 << 20


@dataclass
class BodyBudget:
    """Bytes of request bodies held at the same time, over all requests."""

    limit: int
    used: int = 0


@dataclass
class Body:
    """`fields`: JSON object, or form field → text, list of texts, or uploaded bytes (`Upload`)."""

    fields: dict[str, Any] = field(default_factory=dict)
    is_form: bool = False


@dataclass(frozen=True)
class Upload:
    """An uploaded file. The client's file name and type are not kept: neither is to be believed."""

    data: bytes


async def read_body(request: Request, config: ServerConfig, budget: BodyBudget) -> Body:
    """Parse a JSON object or a multipart form.

    Raises: ApiError: 400 malformed, 408 too slow, 413 too large, 415 another type or an encoding, 429 too many
        bodies at once, 507 no space for uploads.
    """
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise ApiError(
            "compressed bodies are not taken (their size is unknown)", status=415, where="Content-Encoding",
            found=repr(encoding[:40]), expected="no encoding",
        )  # fmt: skip
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    stream = _Limited(request, config, budget)
    try:
        if kind == "application/json":
            return Body(parse_object(b"".join([chunk async for chunk in stream.chunks()])))
        if kind == "multipart/form-data":
            return Body(await _read_form(request, stream, config), is_form=True)
    except ClientDisconnect as gone:
        raise ApiError("the client left before the body was complete", code="client_gone") from gone
    except OSError as error:
        if is_storage_error(error):
            raise storage_full() from error
        raise
    finally:
        budget.used -= stream.taken
    raise ApiError(
        "unsupported body", status=415, where="Content-Type", found=repr(kind[:80]),
        expected="application/json or multipart/form-data",
    )  # fmt: skip


class _Limited:
    """The body as chunks, with a byte cap that does not believe Content-Length, a deadline, and the shared budget."""

    def __init__(self, request: Request, config: ServerConfig, budget: BodyBudget) -> None:
        self._request, self._config, self._budget = request, config, budget
        self.taken = 0

    async def chunks(self) -> AsyncIterator[bytes]:
        deadline = time.monotonic() + self._config.body_timeout_s
        declared = self._request.headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > self._config.max_body_bytes:
            await self._refuse_size()
        stream = self._request.stream()
        while True:
            try:
                chunk = await asyncio.wait_for(anext(stream, None), max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                limit = f"{self._config.body_timeout_s:g} s"
                raise ApiError("the body did not arrive in time", status=408, expected=limit) from None
            if chunk is None:
                return
            self.taken += len(chunk)
            self._budget.used += len(chunk)
            if self.taken > self._config.max_body_bytes:
                await self._refuse_size()
            if self._budget.used > self._budget.limit:
                raise ApiError(
                    "too many uploads at the same time", status=429, code="busy", headers={"Retry-After": "5"}
                )
            yield chunk

    async def _refuse_size(self) -> None:
        """Read on for a moment without keeping anything: a client that is still sending would miss the answer."""
        discarded = 0
        try:
            async with asyncio.timeout(DISCARD_S):
                async for chunk in self._request.stream():
                    discarded += len(chunk)
                    if discarded > DISCARD_BYTES:
                        break
        except (TimeoutError, ClientDisconnect, RuntimeError):
            pass
        limit = f"{self._config.max_body_bytes} bytes"
        raise ApiError("the body is too large", status=413, code="body_too_large", expected=limit)


# ---- JSON


def parse_object(data: bytes) -> dict[str, Any]:
    """Strict JSON: UTF-8 without BOM, one object, no duplicate keys, finite numbers, bounded depth and size.

    Raises: ApiError 400, naming the key where there is one.
    """
    if not data.strip():
        raise ApiError("the body is empty; a JSON object is needed", code="invalid_json")
    if data.count(b",") + data.count(b"[") + data.count(b"{") > MAX_JSON_PARTS:
        raise ApiError(
            "the JSON has too many parts", code="invalid_json", expected=f"{MAX_JSON_PARTS} at most"
        )
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_pairs, parse_constant=_constant)
    except UnicodeDecodeError as error:
        raise ApiError(
            "the JSON is not UTF-8", code="invalid_json", found=f"a bad byte at {error.start}"
        ) from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {str(error)[:200]}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError("the JSON must be an object", code="invalid_json", found=type(value).__name__)
    _check_depth(value)
    return value


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ApiError("duplicate key in the JSON", code="invalid_json", where=name[:80])
        _check_text(name, name)
        for leaf in _leaves(value):
            if isinstance(leaf, float) and not math.isfinite(leaf):
                raise ApiError("is not a finite number", code="invalid_json", where=name[:80])
            if isinstance(leaf, str):
                _check_text(name, leaf)
        found[name] = value
    return found


def _leaves(value: Any) -> Iterator[Any]:
    """The value, or what its list holds; objects in it have been checked when they were read."""
    if not isinstance(value, list):
        yield value
        return
    for child in value:
        yield from _leaves(child)


def _check_text(name: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ApiError(
            "is not Unicode text: it holds half of a surrogate pair", code="invalid_unicode", where=name[:80]
        ) from None


def _constant(text: str) -> Any:
    raise ApiError(f"{text} is not JSON", code="invalid_json")


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ApiError:
    return ApiError("the JSON is nested too deep", code="invalid_json", expected=f"{MAX_DEPTH} levels")


# ---- multipart


async def _read_form(request: Request, stream: _Limited, config: ServerConfig) -> dict[str, Any]:
    part_limit = min(
        config.max_body_bytes, 2 * config.max_picture_bytes
    )  # a data URI is a third longer than its file
    parser = MultiPartParser(
        request.headers,
        stream.chunks(),  # type: ignore[arg-type]  # an async iterator is all it needs
        max_files=MAX_FILES,
        max_fields=MAX_FIELDS,
        max_part_size=part_limit,
    )
    try:
        form = await parser.parse()
    except MultiPartException as error:
        status = 413 if "exceeded maximum size" in error.message else 400
        raise ApiError(
            f"the multipart body is malformed: {error.message}", status=status, code="invalid_multipart"
        ) from None
    except (UnicodeError, ValueError, KeyError, IndexError) as error:
        raise ApiError(
            "the multipart body is malformed", code="invalid_multipart", found=type(error).__name__
        ) from None
    try:
        return await _form_fields(form.multi_items(), config)
    finally:
        await form.close()


async def _form_fields(items: list[tuple[str, Any]], config: ServerConfig) -> dict[str, Any]:
    fields: dict[str, list[Any]] = {}
    for name, value in items:
        if isinstance(value, UploadFile):
            if (value.size or 0) > config.max_picture_bytes:
                limit = f"{config.max_picture_bytes} bytes"
                raise ApiError(
                    "the file is too large",
                    status=413,
                    code="file_too_large",
                    where=name[:80],
                    expected=limit,
                )
            value = Upload(await value.read())
        else:
            _check_text(name, name)
            _check_text(name, value)
        fields.setdefault(name, []).append(value)
    return {name: values[0] if len(values) == 1 else values for name, values in fields.items()}
