"""Who takes the fragments of a video (`fragments.Receiver`): a file that others read meanwhile, or a pipe.

Neither can hold the writer up: a file takes bytes as fast as the disk does, and what a pipe's reader has not taken yet
lies in a file without a name, not in memory.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, BinaryIO, Self

from loader.errors import RequestError

_PART = 1 << 18

log = logging.getLogger(__name__)


def _ignore(size: int) -> None:
    return None


class FragmentFile:
    """A new file that grows fragment by fragment. Leaving it by an exception removes it.

    Args:
        on_bytes: called with the file's size after every fragment: so many bytes are whole fragments.
        replace: whether a file of that name may be there.
    Raises: RequestError: it cannot be made.
    """

    def __init__(
        self, path: Path, on_bytes: Callable[[int], None] = _ignore, *, replace: bool = False
    ) -> None:
        self.path = path
        self.size = 0
        self._on_bytes = on_bytes
        try:
            self._file: BinaryIO = path.open("wb" if replace else "xb", buffering=0)
        except OSError as error:
            raise _unwritable(path, error) from error

    def write(self, data: bytes, /) -> None:
        """Raises: OSError: the disk refused; what was written of the fragment is not reported."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]
        self.size += len(data)
        self._on_bytes(self.size)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if error is not None:
            self.path.unlink(missing_ok=True)


class FragmentPipe:
    """Copies fragments to a pipe, terminal or named pipe on a thread of its own, at the reader's pace.

    A reader that leaves ends the copying, not the video: `is_lost` then. Leaving the block normally waits until the
    reader has everything; leaving it by an exception does not.

    Args:
        target: open for writing, or the path of one, opened when its reader comes.
    """

    def __init__(self, target: IO[bytes] | Path) -> None:
        self.is_lost = False
        self._target = target
        self._spool = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (closed by the thread that reads it)
        self._size = 0
        self._is_complete = self._is_given_up = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._copy, name="fragments", daemon=True)
        self._thread.start()

    def write(self, data: bytes, /) -> None:
        """Raises: OSError: the disk refused."""
        with self._changed:
            if self.is_lost:
                return
            os.pwrite(self._spool.fileno(), data, self._size)
            self._size += len(data)
            self._changed.notify()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._is_complete, self._is_given_up = error is None, error is not None
            self._changed.notify()
        if error is None:
            self._thread.join()

    def _copy(self) -> None:
        with self._spool:
            try:
                if not isinstance(self._target, Path):
                    self._copy_to(self._target)
                    return
                with self._target.open("wb", buffering=0) as target:
                    self._copy_to(target)
            except OSError as error:
                with self._changed:
                    self.is_lost = True
                log.warning("the reader of the video left", extra={"reason": str(error)})

    def _copy_to(self, target: IO[bytes]) -> None:
        at = 0
        while (end := self._wait_beyond(at)) > at:
            part = os.pread(self._spool.fileno(), min(_PART, end - at), at)
            at += target.write(part)
            target.flush()

    def _wait_beyond(self, at: int) -> int:
        """Bytes in the spool, more than `at`; `at` itself once there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._size > at or self._is_complete or self._is_given_up)
            return at if self._is_given_up else self._size


def _unwritable(path: Path, error: OSError) -> RequestError:
    return RequestError(
        "the video cannot be streamed there",
        where="fragments",
        found=f"{path}: {error.strerror}",
        expected="a new file in a writable folder",
    )
