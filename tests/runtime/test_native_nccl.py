"""NCCL through ctypes against a library with the C types of nccl.h, written out again there."""

from __future__ import annotations

import ctypes
import threading

import pytest

from loader.errors import CapabilityError, InternalError
from runtime import native_nccl
from runtime.native_nccl import Communicator, Nccl
from tests.fakes.nccl import FakeNccl, FakeStreams


def alone(library: FakeNccl) -> Communicator:
    nccl = Nccl(library)
    return Communicator(nccl, library.streams, 1, 0, nccl.new_id())


def test_version_and_id_come_through() -> None:
    nccl = Nccl(FakeNccl(FakeStreams()))
    assert nccl.version() == 22809
    assert nccl.new_id() == bytes(place % 256 for place in range(128))


def test_a_process_without_the_library_is_told_so(monkeypatch) -> None:
    monkeypatch.setattr(native_nccl, "LIBRARY", "libnccl-of-nobody.so.2")
    with pytest.raises(CapabilityError, match=r"libnccl-of-nobody\.so\.2: cannot be used"):
        Nccl()


@pytest.mark.parametrize("missing", ["ncclCommInitRank", "ncclGroupEnd"])
def test_a_function_that_is_not_there_is_named(missing: str) -> None:
    with pytest.raises(CapabilityError, match=missing):
        Nccl(FakeNccl(FakeStreams(), missing=missing))


@pytest.mark.parametrize("name", ["ncclGetUniqueId", "ncclCommInitRank"])
def test_a_call_that_fails_is_named_with_the_librarys_words(name: str) -> None:
    with pytest.raises(InternalError, match=f"{name} failed: unhandled system error"):
        alone(FakeNccl(FakeStreams(), refuse=name))


def test_a_failed_message_closes_its_group() -> None:
    library = FakeNccl(FakeStreams(), refuse="ncclSend")
    communicator = alone(library)
    memory = ctypes.create_string_buffer(b"seven to", 8)
    place = (0, ctypes.addressof(memory), 8)
    with pytest.raises(InternalError, match="ncclSend failed"):
        communicator.exchange([place], [])
    communicator.exchange([], [])  # refused by the fake if the group were still open


def test_a_rank_alone_gathers_and_sends_to_itself() -> None:
    library = FakeNccl(FakeStreams())
    communicator = alone(library)
    communicator.use_once((16, 64), 32)
    source, target = ctypes.create_string_buffer(b"harbour!", 8), ctypes.create_string_buffer(24)
    address = ctypes.addressof(target)
    communicator.all_gather(ctypes.addressof(source), address, 8)
    communicator.exchange([(0, ctypes.addressof(source), 4)], [(0, address + 8, 4)])
    communicator.broadcast(ctypes.addressof(source), 8, 0)
    communicator.close()
    assert target.raw == b"harbour!harb" + bytes(12)
    assert len(library.destroyed) == 1
    assert not library.aborted
    assert not library.streams.allocations


def test_after_an_abort_every_call_says_so_and_closing_does_nothing() -> None:
    library = FakeNccl(FakeStreams())
    communicator = alone(library)
    communicator.abort()
    communicator.abort()
    with pytest.raises(InternalError, match="was aborted"):
        communicator.broadcast(0, 0, 0)
    communicator.close()
    assert (len(library.aborted), len(library.destroyed)) == (1, 0)


def test_an_abort_does_not_wait_for_a_call_that_waits_for_a_dead_rank(monkeypatch) -> None:
    monkeypatch.setattr(native_nccl, "_ABORT_WITHIN_S", 0.05)
    library = FakeNccl(FakeStreams())
    communicator = alone(library)
    is_inside, may_end = threading.Event(), threading.Event()

    def stuck(*arguments: object) -> int:
        is_inside.set()
        may_end.wait(60)
        return 0

    communicator._nccl._library.ncclBroadcast = stuck
    caller = threading.Thread(target=communicator.broadcast, args=(0, 1, 0))
    caller.start()
    assert is_inside.wait(60)
    communicator.abort()
    assert not library.aborted
    may_end.set()
    caller.join(60)
    communicator.abort()
    assert len(library.aborted) == 1
