"""Drivers for an uploader process: each function is named by `StreamOptions.uploader_driver` and called in that process.

A process whose books do not balance at its end exits with code 99.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time

from loader.errors import InternalError
from tests.fakes.driver import FakeDriver


def _checked(driver: FakeDriver) -> FakeDriver:
    def check() -> None:
        try:
            driver.finish()
        except AssertionError as error:
            sys.stderr.write(f"fake driver: {driver.violations} {error!r}\n")
            sys.stderr.flush()
            os._exit(99)

    atexit.register(check)
    return driver


def plain() -> FakeDriver:
    return _checked(FakeDriver())


def slow() -> FakeDriver:
    return _checked(FakeDriver(max_delay_s=0.002))


def no_device() -> FakeDriver:
    return _checked(FakeDriver(has_device=False))


def no_sharing() -> FakeDriver:
    return _checked(FakeDriver(sharing_allowed=False))


def no_codec() -> FakeDriver:
    return _checked(FakeDriver(codec_version=None))


def no_pinning() -> FakeDriver:
    return _checked(FakeDriver(pin_limit=0))


class _OncePageable(FakeDriver):
    """A slot that could not be pinned is copied from once, and not filled again."""

    def __init__(self) -> None:
        super().__init__(pin_limit=8192)
        self._copied: set[int] = set()

    def copy_async(self, target: int, source: int, size: int, stream: int) -> None:
        if not any(first <= source < first + count for first, count in self.registered.items()):
            self._require(source not in self._copied, "a slot that is not pinned was filled again")
            self._copied.add(source)
        super().copy_async(target, source, size, stream)


def little_pinning() -> FakeDriver:
    return _checked(FakeDriver(pin_limit=8192))


def once_pageable() -> FakeDriver:
    return _checked(_OncePageable())


def no_thread_to_pin() -> FakeDriver:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "pinner":
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = refuse  # type: ignore[method-assign]
    return _checked(FakeDriver())


def no_pipe_to_pin() -> FakeDriver:
    pipe = os.pipe

    def refuse() -> tuple[int, int]:
        if sys._getframe(1).f_code.co_filename.endswith("pinner.py"):
            raise OSError(24, "Too many open files")
        return pipe()

    os.pipe = refuse
    return _checked(FakeDriver())


class _NoContextForPinning(FakeDriver):
    def use_context(self, context: int) -> None:
        if threading.current_thread().name == "pinner":
            raise InternalError("no context for this thread", where="fake driver")
        super().use_context(context)


def no_context_to_pin() -> FakeDriver:
    return _checked(_NoContextForPinning())


class _PinsLate(FakeDriver):
    """The third slot is pinned only after more copies than the first two slots hold at a time."""

    def host_register(self, address: int, size: int) -> None:
        deadline = time.monotonic() + 20
        while len(self.registered) == 2 and self.copies < 5:
            if time.monotonic() > deadline:
                raise InternalError("copies wait for a slot that is being pinned", where="fake driver")
            time.sleep(0.001)
        super().host_register(address, size)


def pins_late() -> FakeDriver:
    return _checked(_PinsLate())


class _BreaksPinning(FakeDriver):
    def host_register(self, address: int, size: int) -> None:
        if len(self.registered) == 2:
            raise InternalError("sticky error of registration", where="fake driver")
        super().host_register(address, size)


def breaks_pinning() -> FakeDriver:
    return _BreaksPinning()


def small_device() -> FakeDriver:
    return _checked(FakeDriver(device_bytes=60_000))


def broken_copy() -> FakeDriver:
    """The fifth copy meets a sticky error; nothing can be released then."""
    return FakeDriver(fail_copy=5)


def dies_at_start() -> FakeDriver:
    os._exit(7)


class _DyingAtOnce(FakeDriver):
    def copy_async(self, target: int, source: int, size: int, stream: int) -> None:
        os.kill(os.getpid(), 9)


def dies_in_its_first_copy() -> FakeDriver:
    return _DyingAtOnce()


class _NeverReady(FakeDriver):
    def retain_context(self, ordinal: int) -> int:
        threading.Event().wait()
        return super().retain_context(ordinal)


def never_ready() -> FakeDriver:
    return _NeverReady()


class _Keeping(FakeDriver):
    def release_context(self, ordinal: int) -> None:
        raise InternalError("busy", where="fake driver")


def keeps_its_context() -> FakeDriver:
    return _checked(_Keeping())
