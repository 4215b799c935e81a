"""The folder in which a prepared directory grows, and the moment it becomes visible.

Files are written beside the target in `.<name>.partial/model`, each under a temporary name, flushed to disk and renamed.
The ledger beside that folder records what is finished, so that a prepare killed anywhere, even while it publishes,
continues. Publishing is one rename of the whole folder.
A lock beside the target keeps two prepares apart; it dies with its process.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from loader.errors import ArtifactError, CapabilityError, InternalError
from loader.manifest import MANIFEST_NAME

WORK_SUFFIX = ".partial"
LEDGER_NAME = "ledger.json"
GROWING = "model"
_TEMPORARY = ".writing"
_RESERVE_BYTES = 8 << 20  # manifest, ledger, folder entries
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2

FreeBytes = Callable[[Path], int]


def free_disk_bytes(folder: Path) -> int:
    """Bytes that an unprivileged process may still write to the file system of `folder`."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


class Staging:
    """Exclusive access to one target while it is prepared. Use as `with open_staging(...) as staging`."""

    def __init__(self, target: Path, key: str) -> None:
        self.target = target
        self._work = target.parent / f".{target.name}{WORK_SUFFIX}"
        self.folder = self._work / GROWING
        self._lock = threading.Lock()
        self._ledger: dict[str, Any] = self._read_ledger(key)
        self._sweep()

    def finished(self, name: str) -> Any:
        """What `finish` recorded under this name in this run or in an interrupted one; None if nothing."""
        return self._ledger["done"].get(name)

    def finish(self, records: Mapping[str, object]) -> None:
        """Record, on disk and at once, that these names are done. Records are JSON-ready. Threads may call it."""
        with self._lock:
            self._ledger["done"] |= json.loads(json.dumps(records))
            data = json.dumps(self._ledger, separators=(",", ":")).encode()
            with self._new_file(self._work / LEDGER_NAME) as file:
                file.write(data)

    @contextmanager
    def new_file(self, path: str) -> Iterator[BinaryIO]:
        """A file to fill; when the block ends without an error it is on disk under `path`.

        Raises: CapabilityError: the disk is full (what is finished stays for the next attempt).
        """
        with self._new_file(self.folder / path) as file:
            yield file

    @contextmanager
    def _new_file(self, final: Path) -> Iterator[BinaryIO]:
        temporary = final.with_name(final.name + _TEMPORARY)
        with _disk_full_reported(self.target):
            final.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("w+b") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(final)

    def check_space(self, num_bytes: int, free_bytes: FreeBytes) -> None:
        """Raises: CapabilityError: fewer than `num_bytes` (and a small reserve) are free. Call before writing."""
        needed, free = num_bytes + _RESERVE_BYTES, free_bytes(self.folder)
        if free < needed:
            raise CapabilityError(
                "not enough free disk space",
                where=str(self.target.parent),
                found=f"{free} bytes free",
                expected=f"at least {needed} bytes",
                hint=f"free {needed - free} bytes or choose another target",
            )

    def publish(self) -> None:
        """Make the folder visible under the target's name, in one step, and clear the rest away."""
        for folder in [path for path in self.folder.rglob("*") if path.is_dir()]:
            _sync_folder(folder)
        _sync_folder(self.folder)
        if self.target.exists() and any(self.target.iterdir()):
            _exchange(self.folder, self.target)
        else:
            self.folder.rename(self.target)
        _sync_folder(self.target.parent)
        shutil.rmtree(self._work)

    def _read_ledger(self, key: str) -> dict[str, Any]:
        """The ledger of an interrupted prepare with the same inputs; anything else there is cleared away."""
        try:
            ledger = json.loads((self._work / LEDGER_NAME).read_bytes())
        except (OSError, ValueError):
            ledger = None
        is_ours = (
            isinstance(ledger, dict) and ledger.get("key") == key and isinstance(ledger.get("done"), dict)
        )
        if is_ours and self.folder.is_dir():
            return dict(ledger)
        if self._work.exists():
            shutil.rmtree(self._work)
        self.folder.mkdir(parents=True)
        return {"key": key, "done": {}}

    def _sweep(self) -> None:
        """Remove files that no record covers, and records whose file is gone or has another size."""
        done = self._ledger["done"]
        for name, record in list(done.items()):
            size = record.get("size") if isinstance(record, dict) else None
            path = self.folder / name
            if size is not None and not (path.is_file() and path.stat().st_size == size):
                del done[name]
        for path in [path for path in self.folder.rglob("*") if path.is_file()]:
            name = path.relative_to(self.folder).as_posix()
            if name not in done:
                path.unlink()


@contextmanager
def open_staging(target: Path, key: str, *, replace: bool) -> Iterator[Staging]:
    """Lock `target`, check that it may be written, and open or continue its partial folder.

    Args:
        key: digest of all inputs and options; an interrupted prepare continues only under the same key.
        replace: an existing prepared directory may be replaced.
    Raises: CapabilityError: another prepare holds the lock. ArtifactError: something is in the target's place.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with _target_lock(target):
        work = target.parent / f".{target.name}{WORK_SUFFIX}"
        if work.is_dir() and not (work / GROWING).is_dir():
            shutil.rmtree(work)  # killed between publishing and clearing away
        _check_target(target, replace=replace)
        yield Staging(target, key)


def _check_target(target: Path, *, replace: bool) -> None:
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise ArtifactError("target exists and is not a folder", where=str(target))
    if not target.exists():
        return
    if not any(target.iterdir()):
        return
    if not (target / MANIFEST_NAME).is_file():
        raise ArtifactError(
            "target exists and is not a prepared directory", where=str(target), hint="choose another"
        )
    if not replace:
        raise ArtifactError(
            "target exists", where=str(target), hint="pass --replace or choose another target"
        )


@contextmanager
def _target_lock(target: Path) -> Iterator[None]:
    path = target.parent / f".{target.name}.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 32, 0).decode(errors="replace") or "unknown"
            raise CapabilityError(
                "another prepare of this target is running",
                where=str(target),
                found=f"process {owner}",
                hint="wait for it, or choose another target",
            ) from None
        # The previous owner may have removed the file between our open and our lock.
        if not path.exists() or path.stat().st_ino != os.fstat(descriptor).st_ino:
            raise CapabilityError(
                "another prepare of this target has just ended", where=str(target), hint="try again"
            )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


@contextmanager
def _disk_full_reported(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise InternalError(f"cannot be written ({error.strerror})", where=str(target)) from error
        raise CapabilityError(
            f"disk is full ({error.strerror})",
            where=str(target),
            hint="free space and start again; finished files are kept",
        ) from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(first: Path, second: Path) -> None:
    """Swap two folders in one step; where the system cannot, in two steps with a gap between them."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        arguments = (_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
        if libc.renameat2(*arguments) == 0:
            return
    aside = second.with_name(f".{second.name}.old")
    second.rename(aside)
    first.rename(second)
    aside.rename(first)
