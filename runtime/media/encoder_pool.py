"""Encoder processes that are up before the first picture is, and the memory through which they get pictures.

A process that dies or hangs is replaced and its task repeated once; a second death fails the task. Where no child can
be started, one thread of this process encodes instead: the same sessions, hence the same bytes. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loader.errors import CapabilityError, InternalError
from runtime.media.encoder_process import Encoder
from runtime.media.picture_memory import PictureMemory, PictureSlot
from runtime.media.unit_encoder import Layout, PictureOptions

if TYPE_CHECKING:
    from subprocess import Popen

log = logging.getLogger(__name__)

LARGEST_UNIT = 24
"""Frames of a unit that memory is reserved for ahead; a larger one makes the memory grow when it comes."""
_MOST_SAMPLES_A_SECOND = 48_000
_READ = 1 << 20
_REAP_S = 5.0
_ATTEMPTS = 2  # of one task, each with another process


class EncoderDied(Exception):
    """The process ended, or was ended, before it answered; the task may be given to another."""


class EncoderProcess:
    """One child. Used by one thread at a time."""

    def __init__(self, memory_descriptor: int) -> None:
        program = Path(__file__).with_name("encoder_process.py")
        self.child: Popen[bytes] = subprocess.Popen(
            [sys.executable, "-S", "-E", "-I", str(program), str(memory_descriptor), _search_path()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(memory_descriptor,),
        )
        assert self.child.stdout is not None
        os.set_blocking(self.child.stdout.fileno(), False)

    def run(self, task: Mapping[str, object], timeout_s: float) -> bytes:
        """Result of one task. Raises: EncoderDied; CapabilityError and InternalError as the child reported them."""
        assert self.child.stdin is not None
        try:
            self.child.stdin.write(json.dumps(task).encode() + b"\n")
            self.child.stdin.flush()
        except (BrokenPipeError, ValueError) as error:
            raise EncoderDied(self._ending()) from error
        header, data = self._answer(time.monotonic() + timeout_s)
        if "error" in header:
            raise _reported(header["error"])
        return data

    def close(self) -> None:
        """End the child and wait for it; an idle one ends with its stdin, another is killed."""
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.child.stdin.close()
        try:
            self.child.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self.child.stdout.close()

    def kill(self) -> None:
        self.child.kill()
        self.child.wait()

    def _answer(self, deadline: float) -> tuple[dict[str, Any], bytes]:
        received = bytearray()
        while b"\n" not in received:
            self._receive(received, deadline)
        line, _, rest = bytes(received).partition(b"\n")
        header = json.loads(line)
        data = bytearray(rest)
        while len(data) < header.get("bytes", 0):
            self._receive(data, deadline)
        return header, bytes(data)

    def _receive(self, into: bytearray, deadline: float) -> None:
        assert self.child.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.child.stdout, selectors.EVENT_READ)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                self.kill()
                raise EncoderDied("it did not answer in time and was stopped")
        part = os.read(self.child.stdout.fileno(), _READ)
        if not part:
            raise EncoderDied(self._ending())
        into += part

    def _ending(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(_REAP_S)
        return f"exit status {self.child.poll()}"


class EncoderPool:
    """Up to `processes` tasks at a time. A context manager; `close` ends every child.

    Args:
        processes: encoder processes; 0: encode on one thread of this process.
        timeout_s: after which a task's process counts as hung.
    """

    def __init__(self, processes: int, *, timeout_s: float = 60.0) -> None:
        self.processes = processes
        self.timeout_s = timeout_s
        self.fallback = "" if processes else "asked for"
        """Why this process encodes itself; empty while child processes do."""
        self.replaced = 0
        self.memory = PictureMemory()
        self._local = Encoder(self.memory.file_descriptor)
        self._idle: deque[EncoderProcess] = deque()
        self._all: list[EncoderProcess] = []
        self._lock = threading.Lock()
        self._starting = threading.RLock()
        self._threads = ThreadPoolExecutor(max(1, processes), thread_name_prefix="encoder")
        self._probed: dict[PictureOptions, Future[bytes]] = {}
        self._is_started = self._is_closed = False

    def start(self, options: PictureOptions | None = None, frames: int = 0, *, pin: bool = False) -> None:
        """Spawn what is missing and, for a request, try its options and reserve memory for its units.

        Does not wait for the processes. Safe to call from several threads, and again.

        Args:
            frames: of the whole clip.
            pin: see `PictureMemory.resize`.
        Raises: InternalError: no memory for the pictures.
        """
        with self._starting:
            self._spawn()
            if options is not None and options not in self._probed:
                self._probed[options] = self._submit({"kind": "probe", "options": asdict(options)}, None)
            if options is not None and frames:
                pictures = options.frame_bytes("yuv420p") * min(frames, LARGEST_UNIT)
                sound = 8 * round((frames + 1) * _MOST_SAMPLES_A_SECOND / options.fps)
                self.memory.resize(max(pictures, sound), self.slots, pin=pin)

    def start_ahead(self, options: PictureOptions, frames: int, pin: bool) -> None:
        """`start`, and the imports that muxing needs, long before the first picture; failures are left to `start`."""
        import av
        import numpy as np

        del av, np
        try:
            self.start(options, frames, pin=pin)
        except InternalError as error:
            log.warning("encoders are not ready ahead", extra={"reason": str(error)})

    def _spawn(self) -> None:
        if self._is_started:
            return
        self._is_started = True
        for _ in range(self.processes):
            if not self._add():
                break

    @property
    def slots(self) -> int:
        """One for each encoder, one that is being filled, one for the sound."""
        return max(1, self.processes) + 2

    def probe(self, options: PictureOptions) -> None:
        """Raises: CapabilityError: this machine has no such encoder, or it refuses the options."""
        self.start(options)
        self._probed[options].result()

    def encode(self, slot: PictureSlot, count: int, layout: Layout, options: PictureOptions) -> Future[bytes]:
        """Encode the `count` frames in a slot, see `unit_encoder.encode_pictures`; the slot is released afterwards."""
        task = {"kind": "pictures", "offset": slot.offset, "bytes": count * options.frame_bytes(layout)}
        return self._submit({**task, "count": count, "layout": layout, "options": asdict(options)}, slot)

    def encode_sound(self, slot: PictureSlot, size: int, sample_rate: int, bit_rate: int) -> Future[bytes]:
        """Encode the float32 [2, n] samples, `size` bytes, in a slot; the slot is released afterwards."""
        task = {"kind": "sound", "offset": slot.offset, "bytes": size}
        return self._submit({**task, "sample_rate": sample_rate, "bit_rate": bit_rate}, slot)

    def close(self) -> None:
        """End every child and free the memory; tasks that have not begun are cancelled. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in self._all:
            process.close()
        self._all.clear()
        self._idle.clear()
        self.memory.close()

    def __enter__(self) -> EncoderPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, task: Mapping[str, object], slot: PictureSlot | None) -> Future[bytes]:
        with self._starting:
            self._spawn()
        future = self._threads.submit(self._run, task)
        if slot is not None:
            future.add_done_callback(lambda _: self.memory.release(slot))
        return future

    def _run(self, task: Mapping[str, object]) -> bytes:
        deaths: list[str] = []
        while len(deaths) < _ATTEMPTS and not self.fallback:
            answer = self._attempt(task)
            if isinstance(answer, bytes):
                return answer
            deaths.append(str(answer))
        if self.fallback:
            return self._local.run(dict(task))
        raise InternalError("encoder processes died on one task", where="encoder", found="; ".join(deaths))

    def _attempt(self, task: Mapping[str, object]) -> bytes | EncoderDied:
        process = self._take()
        if process is None:
            return EncoderDied("it could not be replaced")
        try:
            result = process.run(task, self.timeout_s)
        except EncoderDied as death:
            self._replace(process, str(death))
            return death
        except (CapabilityError, InternalError):  # an answer; the process is well
            self._make_idle(process)
            raise
        self._make_idle(process)
        return result

    def _take(self) -> EncoderProcess | None:
        """An idle process; one that died while it was idle is replaced and costs no attempt."""
        process = self._pop()
        if process is not None and (status := process.child.poll()) is not None:
            self._replace(process, f"exit status {status} while idle")
            process = self._pop()
        return process

    def _pop(self) -> EncoderProcess | None:
        with self._lock:
            return self._idle.popleft() if self._idle else None

    def _make_idle(self, process: EncoderProcess) -> None:
        with self._lock:
            self._idle.append(process)

    def _add(self) -> bool:
        """One more process; False, and a fallback, where none can be started."""
        try:
            process = EncoderProcess(self.memory.file_descriptor)
        except OSError as error:
            self.fallback = f"no child process: {error}"
            log.warning("pictures are encoded in this process", extra={"reason": self.fallback})
            return False
        with self._lock:
            self._all.append(process)
            self._idle.append(process)
        return True

    def _replace(self, process: EncoderProcess, ending: str) -> None:
        log.warning("encoder process died, replaced", extra={"ending": ending})
        with self._lock:
            self._all.remove(process)
        process.close()
        self.replaced += 1
        self._add()


def _search_path() -> str:
    """Where this process finds modules, as JSON: the child runs without site packages of its own."""
    here = str(Path(__file__).parents[2])
    paths = [path or str(Path.cwd()) for path in sys.path]
    return json.dumps(paths if here in paths else [*paths, here])


def _reported(error: Mapping[str, Any]) -> CapabilityError | InternalError:
    make: Callable[..., CapabilityError | InternalError] = (
        CapabilityError if error["is_capability"] else InternalError
    )
    return make(
        error["message"],
        where=error.get("where") or "video encoder",
        found=error.get("found"),
        hint=error.get("hint"),
    )
