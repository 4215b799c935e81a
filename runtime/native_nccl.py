"""NCCL through ctypes: a communicator that needs no torch, and the few calls that ranks use.

torch makes its communicators after it has been imported. Made here, on a thread without the interpreter lock, a communicator is
ready when torch is. Everything moves as bytes: nothing here adds numbers up. Standard library only; signatures are those of
nccl.h, which NCCL keeps within its major version 2.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_void_p
from typing import Any, Protocol

from loader.errors import CapabilityError, InternalError

LIBRARY = "libnccl.so.2"
_SUCCESS = 0
_BYTES = 1  # ncclUint8
_ABORT_WITHIN_S = 1.0

ID_BYTES = 128


class _Id(ctypes.Structure):
    """ncclUniqueId, passed by value."""

    _fields_ = (("internal", c_ubyte * ID_BYTES),)


_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (POINTER(c_int),),
    "ncclGetUniqueId": (POINTER(_Id),),
    "ncclCommInitRank": (POINTER(c_void_p), c_int, _Id, c_int),
    "ncclCommDestroy": (c_void_p,),
    "ncclCommAbort": (c_void_p,),
    "ncclAllGather": (c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p),
    "ncclBroadcast": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclSend": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclRecv": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclGetErrorString": (c_int,),
}


class Nccl:
    """The library, every return code checked.

    Args:
        library: in place of the mapped one, for tests.
    Raises: CapabilityError: it is not mapped into this process, or lacks a function.
    """

    def __init__(self, library: Any = None) -> None:
        try:
            mode = os.RTLD_NOW | os.RTLD_NOLOAD
            self._library = ctypes.CDLL(LIBRARY, mode=mode) if library is None else library
            for name, arguments in _ARGUMENTS.items():
                getattr(self._library, name).argtypes = arguments
            self._library.ncclGetErrorString.restype = c_char_p
        except (OSError, AttributeError) as cause:
            raise CapabilityError(f"cannot be used: {cause}", where=LIBRARY) from cause

    def version(self) -> int:
        """As NCCL counts: 22809 is 2.28.9."""
        number = c_int()
        self.call("ncclGetVersion", byref(number))
        return number.value

    def new_id(self) -> bytes:
        """What all ranks of one communicator must know; whoever makes it listens on a socket for them."""
        made = _Id()
        self.call("ncclGetUniqueId", byref(made))
        return bytes(made)

    def join(self, size: int, rank: int, unique_id: bytes) -> int:
        """A communicator on this thread's device, once all ranks have called this."""
        communicator = c_void_p()
        self.call("ncclCommInitRank", byref(communicator), size, _Id.from_buffer_copy(unique_id), rank)
        return communicator.value or 0

    def call(self, name: str, *arguments: object) -> None:
        """Raises: InternalError: the call failed."""
        code = getattr(self._library, name)(*arguments)
        if code != _SUCCESS:
            text = (self._library.ncclGetErrorString(code) or b"").decode("utf-8", "replace")
            raise InternalError(f"{name} failed: {text}", where="NCCL", found=code)


class StreamDriver(Protocol):
    """What a communicator needs of the driver; a context is current on the thread. See `loader.cuda_library`."""

    def stream_create(self) -> int: ...

    def stream_synchronize(self, stream: int) -> None: ...

    def stream_destroy(self, stream: int) -> None: ...

    def alloc(self, size: int) -> int: ...

    def free(self, pointer: int) -> None: ...


class Communicator:
    """One rank's end; all ranks make the same calls in the same order. Calls queue work on `stream` and return.

    Args:
        unique_id: `Nccl.new_id` of one rank, known to all.
    Raises of all methods: InternalError: a call failed, or the communicator was aborted.
    """

    def __init__(self, nccl: Nccl, device: StreamDriver, size: int, rank: int, unique_id: bytes) -> None:
        self.size, self.rank = size, rank
        self._nccl, self._device = nccl, device
        self._lock = threading.Lock()
        self.stream = device.stream_create()
        self._handle = nccl.join(size, rank, unique_id)

    def all_gather(self, source: int, target: int, count: int) -> None:
        """`count` bytes at `source` of every rank to `target`, in rank order."""
        with self._usable() as handle:
            self._nccl.call("ncclAllGather", source, target, count, _BYTES, handle, self.stream)

    def broadcast(self, address: int, count: int, root: int) -> None:
        with self._usable() as handle:
            self._nccl.call("ncclBroadcast", address, address, count, _BYTES, root, handle, self.stream)

    def exchange(
        self, sent: Sequence[tuple[int, int, int]], received: Sequence[tuple[int, int, int]]
    ) -> None:
        """All at once; each is (rank, address, bytes). A rank may send to itself."""
        with self._usable() as handle:
            self._nccl.call("ncclGroupStart")
            try:
                for rank, address, count in sent:
                    self._nccl.call("ncclSend", address, count, _BYTES, rank, handle, self.stream)
                for rank, address, count in received:
                    self._nccl.call("ncclRecv", address, count, _BYTES, rank, handle, self.stream)
            finally:
                self._nccl.call("ncclGroupEnd")

    def use_once(self, gathered: Sequence[int], exchanged: int) -> None:
        """On all ranks: connect to every peer and load the kernels, and wait for that.

        Args:
            gathered: bytes of a rank's part, for one gather each: NCCL has another kernel for another size.
            exchanged: bytes that go from every rank to every rank.
        """
        most = max(*gathered, exchanged)
        memory = self._device.alloc(2 * self.size * most)
        half = memory + self.size * most
        try:
            for count in gathered:
                self.all_gather(memory, half, count)
            self.exchange(
                [(rank, memory + rank * exchanged, exchanged) for rank in range(self.size)],
                [(rank, half + rank * exchanged, exchanged) for rank in range(self.size)],
            )
            self._device.stream_synchronize(self.stream)
        except InternalError:
            self.abort()  # else the memory could not be freed before a rank that is dead has answered
            raise
        finally:
            self._device.free(memory)

    def abort(self) -> None:
        """Make everything under way end, on any thread. Results are whatever memory holds then. Works twice, raises nothing.

        A call of another thread that waits for a dead rank may keep the communicator: then nothing happens.
        """
        if self._lock.acquire(timeout=_ABORT_WITHIN_S):
            try:
                handle, self._handle = self._handle, 0
                if handle:
                    with contextlib.suppress(InternalError):
                        self._nccl.call("ncclCommAbort", handle)
            finally:
                self._lock.release()

    def close(self) -> None:
        """Wait for what is under way and leave; nothing after `abort`."""
        with self._lock:
            handle, self._handle = self._handle, 0
            if handle:
                self._device.stream_synchronize(self.stream)
                self._nccl.call("ncclCommDestroy", handle)
                self._device.stream_destroy(self.stream)

    @contextlib.contextmanager
    def _usable(self) -> Iterator[int]:
        with self._lock:
            if not self._handle:
                raise InternalError("the communicator was aborted", where="NCCL")
            yield self._handle
