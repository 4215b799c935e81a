"""Every error that this project raises on purpose.

    WorkerError                 exit code 1, HTTP 500
    ├─ RequestError        2    400 malformed, 413/415 too large or wrong type, 422 this prepared directory cannot
    ├─ ArtifactError       3    503  prepare and integrity: names file, tensor, expected, found
    ├─ CapabilityError     4    503  something is missing here: names it and the fallback taken or the fix
    └─ InternalError       1    500  ours: a broken invariant or a failure below us, with its cause chained

A message reads: where – what was found – what is allowed – what to do. Errors of one kind found together are
reported together. Standard library only.
"""

from __future__ import annotations


class WorkerError(Exception):
    """Base of the tree. `str(error)` is the full one-line message; the parts stay available for machines.

    Args:
        message: what is wrong, in one sentence, without the parts below.
        where: request field (`"num_frames"`), or file and tensor (`"weights/dit-1.safetensors: proj_in.weight"`).
        found: the offending value, quoted by the caller where it is text.
        expected: what is allowed.
        hint: what the reader can do about it.
    """

    exit_code = 1
    http_status = 500
    kind = "internal"

    def __init__(
        self,
        message: str,
        *,
        where: str | None = None,
        found: object = None,
        expected: object = None,
        hint: str | None = None,
    ) -> None:
        self.message = message
        self.where = where
        self.found = found
        self.expected = expected
        self.hint = hint
        super().__init__(str(self))

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        if self.found is not None:
            text += f"; found {self.found}"
        if self.expected is not None:
            text += f"; allowed: {self.expected}"
        if self.hint:
            text += f" – {self.hint}"
        return text

    def as_dict(self) -> dict[str, object]:
        """JSON-ready form, as printed by `--json` and sent over the worker protocol and HTTP."""
        return {
            "kind": self.kind,
            "message": str(self),
            "where": self.where,
            "found": None if self.found is None else str(self.found),
            "expected": None if self.expected is None else str(self.expected),
            "hint": self.hint,
            "http_status": self.http_status,
        }


class RequestError(WorkerError):
    """The caller's request cannot be served as written. `where` is the field's name."""

    exit_code = 2
    http_status = 400
    kind = "bad_request"

    def __init__(
        self,
        message: str,
        *,
        where: str | None = None,
        found: object = None,
        expected: object = None,
        hint: str | None = None,
        http_status: int = 400,
    ) -> None:
        super().__init__(message, where=where, found=found, expected=expected, hint=hint)
        self.http_status = http_status


class ArtifactError(WorkerError):
    """A checkpoint or prepared directory is wrong: missing, damaged, misshapen or not what was pinned."""

    exit_code = 3
    http_status = 503
    kind = "bad_artifact"


class CapabilityError(WorkerError):
    """Something this machine or installation lacks; `hint` says which fallback or fix exists."""

    exit_code = 4
    http_status = 503
    kind = "unavailable_capability"


class InternalError(WorkerError):
    """A failure of ours or of the system below us; the cause is chained."""
