"""Errors as the HTTP API shows them: one envelope, one place that decides status, type and code."""

from __future__ import annotations

from collections.abc import Mapping

from loader.errors import ArtifactError, CapabilityError, InternalError, RequestError, WorkerError

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
DEFAULT_CODES = {
    400: "invalid_request",
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    409: "conflict",
    413: "too_large",
    415: "unsupported_media_type",
    422: "unprocessable",
    429: "rate_limited",
    500: "internal_error",
    503: "unavailable",
    507: "storage_full",
}


class ApiError(RequestError):
    """A refusal with an OpenAI-style code.

    Args:
        code: machine-readable, stable (`queue_full`, `unknown_parameter`, …).
        headers: response headers that go with it (`Retry-After`).
        extra: further keys of the error object (`job_id` of a job that goes on).
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        where: str | None = None,
        found: object = None,
        expected: object = None,
        hint: str | None = None,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message, where=where, found=found, expected=expected, hint=hint, http_status=status)
        self.code = code or DEFAULT_CODES.get(status, "invalid_request")
        self.headers = dict(headers or {})
        self.extra = dict(extra or {})


def error_type(status: int) -> str:
    """OpenAI's `type` for an HTTP status."""
    return TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")


def error_object(error: WorkerError) -> dict[str, object]:
    """`{message, type, param, code}` of any of our errors; internals of 500s stay in the log."""
    status = error.http_status
    code = error.code if isinstance(error, ApiError) else DEFAULT_CODES.get(status, "invalid_request")
    message = clean(str(error))
    if status == 500:
        message = "The server failed to handle this request; see its log under the request id."
    param = clean(error.where) if isinstance(error, RequestError) and error.where is not None else None
    extra = error.extra if isinstance(error, ApiError) else {}
    return {"message": message, "type": error_type(status), "param": param, "code": code, **extra}


def envelope(error: Mapping[str, object]) -> dict[str, object]:
    """Response body; `detail` repeats the message for clients written against FastAPI services."""
    return {"error": dict(error), "detail": error["message"]}


def job_error(code: str, message: str, param: str | None = None, status: int = 500) -> dict[str, object]:
    """`error` of a failed job."""
    shown = clean(param) if param is not None else None
    return {"code": code, "message": clean(message), "param": shown, "type": error_type(status)}


def worker_job_error(error: Mapping[str, object]) -> dict[str, object]:
    """Translate the `error` of the worker protocol (`WorkerError.as_dict()`) for a failed job.

    Bad requests keep their text and field; failures of ours are named by kind only, because their text may hold
    paths of the host.
    """
    status = error.get("http_status")
    status = status if isinstance(status, int) else 500
    kind = str(error.get("kind") or "internal")
    if kind == RequestError.kind:
        where = error.get("where")
        return job_error("invalid_request", str(error.get("message")), str(where) if where else None, status)
    texts = {
        ArtifactError.kind: "the prepared directory is damaged or incomplete",
        CapabilityError.kind: "the worker lacks something that this request needs",
    }
    return job_error(
        kind, texts.get(kind, "generation failed; see the worker's log under the job id"), None, status
    )


def is_lost_rank(error: Mapping[str, object]) -> bool:
    """Whether a worker of several ranks gave up because one of them did (docs/parallel.md)."""
    return error.get("kind") == InternalError.kind and error.get("where") == "ranks"


def clean(text: str) -> str:
    """Text that any client and log can show: lone surrogates and control characters escaped, 2000 characters."""
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    text = "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)
    return text if len(text) <= 2000 else text[:2000] + "…"
