"""Around every request: id, key, error envelope, metrics, one log line. Plain ASGI, so that streams pass untouched."""

from __future__ import annotations

import logging
import os
import re
import time

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loader.errors import InternalError, WorkerError
from runtime.server.admission import authenticate
from runtime.server.errors import ApiError, envelope, error_object
from runtime.server.jobs import is_storage_error, storage_full
from runtime.server.service import Service

OPEN_PATHS = frozenset(
    {"/", "/health", "/health-check", "/livez", "/liveness", "/ping", "/ready", "/readyz", "/version", "/openapi.json", "/favicon.ico"}
)  # fmt: skip
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_UNTIMED = ("/events", "/sync")

log = logging.getLogger("runtime.server.access")


class Gate:
    """ASGI middleware of the service.

    Sets `owner`, `request_id` and `traceparent` in the scope; the key never reaches a handler, a log or an error.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        request_id = _request_id(headers)
        scope["request_id"] = request_id
        scope["traceparent"] = _traceparent(headers)
        began, status = time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", request_id.encode()),
                    (b"x-content-type-options", b"nosniff"),
                ]
            await send(message)

        try:
            response = self._refusal(scope, headers)
            await (response or self._app)(scope, receive, send_with_id)
        except Exception as error:  # border: the last one before the socket
            if status:
                raise
            await _internal(error, request_id)(scope, receive, send_with_id)
        finally:
            self._record(scope, status, began, request_id)
        return None

    def _refusal(self, scope: Scope, headers: dict[bytes, str]) -> Response | None:
        owner = authenticate(headers.get(b"authorization"), self._service.config.api_key_hashes)
        scope["owner"] = owner
        if owner is not None or scope["path"] in OPEN_PATHS:
            return None
        missing = b"authorization" not in headers
        message = "no API key was given" if missing else "this API key is not accepted"
        error = ApiError(message, status=401, hint="send it as Authorization: Bearer <key>")
        return JSONResponse(envelope(error_object(error)), 401, {"WWW-Authenticate": "Bearer"})

    def _record(self, scope: Scope, status: int, began: float, request_id: str) -> None:
        route = getattr(scope.get("route"), "path", "unmatched").replace(":video}", "}")
        seconds = time.perf_counter() - began
        self._service.metrics.count("h3_requests_total", route=route, status=str(status))
        if not (route.endswith(_UNTIMED) or scope.get("is_untimed")):
            self._service.metrics.observe("h3_request_duration_seconds", seconds, route=route)
        is_quiet = scope["method"] in ("GET", "HEAD") and (status < 400 or scope["path"] in OPEN_PATHS)
        level = logging.DEBUG if is_quiet else logging.INFO
        fields = {
            "request_id": request_id,
            "route": route,
            "status": status,
            "dur_ms": round(1e3 * seconds, 2),
        }
        log.log(level, "request", extra={**fields, "method": scope["method"], **_trace_fields(scope)})


def _request_id(headers: dict[bytes, str]) -> str:
    for name in (b"x-request-id", b"x-fal-request-id"):
        if _REQUEST_ID.fullmatch(headers.get(name, "")):
            return headers[name]
    return f"req_{os.urandom(12).hex()}"


def _traceparent(headers: dict[bytes, str]) -> str:
    value = headers.get(b"traceparent", "")
    return value if _REQUEST_ID.fullmatch(value) else ""


def _trace_fields(scope: Scope) -> dict[str, str]:
    return {"traceparent": scope["traceparent"]} if scope["traceparent"] else {}


def _internal(error: Exception, request_id: str) -> Response:
    log.error("request failed", exc_info=error, extra={"request_id": request_id})
    if is_storage_error(error):
        return _error_response(storage_full())
    return _error_response(InternalError("request failed"))


def _error_response(error: WorkerError) -> Response:
    headers = error.headers if isinstance(error, ApiError) else {}
    return JSONResponse(envelope(error_object(error)), error.http_status, headers)


async def on_worker_error(request: Request, error: Exception) -> Response:
    """Any error of the project's tree, raised by a handler."""
    assert isinstance(error, WorkerError)
    service: Service = request.app.state.service
    code = str(error_object(error)["code"])
    service.metrics.count("h3_errors_total", code=code)
    if error.http_status >= 500:
        log.error("request refused", exc_info=error, extra={"request_id": request.scope["request_id"]})
    else:
        log.info(
            "request refused",
            extra={"request_id": request.scope["request_id"], "code": code, "param": error.where},
        )
    return _error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Refusals of the router: unknown path, unknown method."""
    assert isinstance(error, HTTPException)
    messages = {404: "no such route", 405: "this route does not take this method"}
    headers = dict(error.headers or {})
    if error.status_code == 405:
        headers["Allow"] = ", ".join(sorted(_methods(request)))
    message = messages.get(error.status_code, "refused")
    return _error_response(ApiError(message, status=error.status_code, headers=headers))


def _methods(request: Request) -> set[str]:
    """Methods of all routes with this path: the router looks at the first of them only."""
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return {method for route in routes for method in route.methods or ()}
