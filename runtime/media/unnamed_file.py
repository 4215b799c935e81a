"""A file that gets its name when it is complete, and leaves nothing behind whatever ends this process before.

Where the file system can (Linux: O_TMPFILE), the file has no name at all until then; elsewhere a hidden one beside its
target, which only a killed process leaves behind.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from pathlib import Path


class UnnamedFile:
    """Room for one output on its target's file system. Opened by `path`, in this process only."""

    def __init__(self, target: Path) -> None:
        """Raises: OSError: nothing can be written beside `target`, or a folder has its name."""
        if target.is_dir():
            raise IsADirectoryError(f"{target} is a folder")
        self.target = target
        self._descriptor = _open_without_name(target.parent)
        if self._descriptor is None:
            self.path = self._hidden()
            self.path.touch(exist_ok=False)
        else:
            self.path = _reached_by(self._descriptor)

    @property
    def has_name(self) -> bool:
        """Whether a killed process would leave it behind."""
        return self._descriptor is None

    def commit(self) -> None:
        """Give the file its name, replacing what has it. Raises: OSError: it cannot have it."""
        if self._descriptor is None:
            self.path.replace(self.target)
            return
        try:
            self._link(self.target)
        except FileExistsError:  # a link replaces nothing: a second name does, which exists for an instant
            hidden = self._hidden()
            self._link(hidden)
            hidden.replace(self.target)
        except OSError:  # a file system that makes such files but does not name them
            hidden = self._hidden()
            try:
                shutil.copyfile(self.path, hidden)
                hidden.replace(self.target)
            finally:
                hidden.unlink(missing_ok=True)
        self.discard()

    def discard(self) -> None:
        """Free the file; harmless after `commit` and when called twice."""
        if self._descriptor is None:
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)
        elif self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _hidden(self) -> Path:
        return self.target.parent / f".{secrets.token_hex(8)}.part"

    def _link(self, name: Path) -> None:
        # Only `linkat` follows the link in /proc to the file itself, and `os.link` calls it when it is given a folder.
        folder = os.open(name.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.link(self.path, name.name, dst_dir_fd=folder, follow_symlinks=True)
        finally:
            os.close(folder)


def _open_without_name(folder: Path) -> int | None:
    """A descriptor, or None where the system or the file system has no such files, or no way to open them again."""
    if not hasattr(os, "O_TMPFILE"):
        return None
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666)
    except OSError:
        return None
    try:
        os.close(os.open(_reached_by(descriptor), os.O_RDWR))
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _reached_by(descriptor: int) -> Path:
    return Path(f"/proc/self/fd/{descriptor}")
