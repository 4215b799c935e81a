"""A communicator over NCCL for the ranks of one host, made while torch is being imported. Standard library only.

The ranks meet, and the first of them tells the others NCCL's id as soon as all have said that they can take part. If one cannot,
all of them leave it to torch.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from loader.errors import CapabilityError, WorkerError
from runtime.native_nccl import ID_BYTES, Communicator, Nccl
from runtime.parallel.environment import RankEnvironment
from runtime.parallel.meeting import Limit, host_meeting, receive, visit_meeting

if TYPE_CHECKING:
    from loader.cuda_library import CudaLibrary
    from runtime.timeline import Timeline

_VERSION = struct.Struct("<I")  # 0: this rank cannot take part
_NO_ID = bytes(ID_BYTES)
_STEP_S = 0.01
MEET_S = 60.0  # for all ranks to come
JOIN_S = 15.0  # for the library to connect them

_MOST_BYTES = 1 << 28  # that a rank receives at once


def first_uses(size: int) -> tuple[tuple[int, ...], int]:
    """What `size` ranks move once: bytes of a rank's part in each gather, and from every rank to every rank.

    NCCL takes another kernel for small, middle and large parts; the denoiser of two ranks moves up to 64 and 29 MiB.
    """
    most = _MOST_BYTES // size
    return tuple(min(count, most) for count in (1 << 16, 1 << 20, 1 << 25)), min(1 << 24, most)


class EarlyCommunicator:
    """One rank's way to a communicator. `make` on a thread of its own; `cancel` from any other.

    Args:
        open_library: its failure, or that of asking for the version, is this rank's no.
        join: makes and tries out this rank's end from the id that all ranks know.
        meet_s, join_s: limits. A rank that dies while others join would be waited for without end.
    """

    def __init__(
        self,
        environment: RankEnvironment,
        open_library: Callable[[], Nccl],
        join: Callable[[Nccl, RankEnvironment, bytes], Communicator],
        meet_s: float = MEET_S,
        join_s: float = JOIN_S,
    ) -> None:
        self._environment, self._meet_s, self._join_s = environment, meet_s, join_s
        self._open_library, self._join = open_library, join
        self._nccl: Nccl | None = None
        self._cancelled = threading.Event()
        self.problem = ""

    def make(self) -> Communicator | None:
        """The communicator, or None and `problem`. Others may have one all the same, if this rank's `join` was what failed."""
        try:
            return self._joined(self._agree())
        except Exception as error:  # noqa: BLE001 (a border: torch makes one then, whatever was wrong here)
            self.problem = str(error) or repr(error)
            return None

    def cancel(self) -> None:
        """Let `make` return soon."""
        self._cancelled.set()

    def _agree(self) -> bytes:
        """NCCL's id. Raises: CapabilityError: not all ranks can take part, or came in time."""
        version, cause = 0, "a rank cannot take part"
        try:
            self._nccl = self._open_library()
            version = self._nccl.version()
        except WorkerError as error:
            cause = str(error)
        limit = Limit(self._meet_s, self._cancelled)
        unique_id = (
            self._host(version, limit) if self._environment.local_rank == 0 else self._visit(version, limit)
        )
        if unique_id == _NO_ID:
            raise CapabilityError(cause, where="early communicator", found=f"NCCL {version} here")
        return unique_id

    def _host(self, version: int, limit: Limit) -> bytes:
        with host_meeting(self._environment, "nccl", limit) as guests:
            versions = {version}
            for guest in guests:
                versions.update(_VERSION.unpack(receive(guest, _VERSION.size, limit)))
            is_common = len(versions) == 1
            unique_id = self._nccl.new_id() if is_common and self._nccl else _NO_ID
            for guest in guests:
                guest.sendall(unique_id)
        return unique_id

    def _visit(self, version: int, limit: Limit) -> bytes:
        with visit_meeting(self._environment, "nccl", limit) as host:
            host.sendall(_VERSION.pack(version))
            return receive(host, ID_BYTES, limit)

    def _joined(self, unique_id: bytes) -> Communicator:
        """What `join` returns; it runs where it can be left behind, as nothing ends a call of NCCL that waits for a rank."""
        nccl = self._nccl
        assert nccl is not None, "a rank without the library gets no id"
        made: list[Communicator] = []
        failed: list[BaseException] = []
        is_done = threading.Event()

        def run() -> None:
            try:
                made.append(self._join(nccl, self._environment, unique_id))
            except BaseException as error:  # noqa: BLE001 - raised below
                failed.append(error)
            is_done.set()

        threading.Thread(target=run, name="nccl", daemon=True).start()
        for _ in Limit(self._join_s, self._cancelled).tries("NCCL did not return"):
            if is_done.wait(_STEP_S):
                break
        if failed:
            raise failed[0]
        return made[0]


def early_communicator(
    environment: RankEnvironment, timeline: Timeline, wait_mapped: Callable[[], None]
) -> EarlyCommunicator:
    """That of this rank, on the only GPU that it sees.

    Args:
        timeline: gets a span for each part of the work.
        wait_mapped: returns once torch's libraries are mapped. The context is made meanwhile.
    """

    def open_library() -> Nccl:
        with timeline.span("communicator: context"):
            _driver_in_use()
        with timeline.span("communicator: libraries"):
            wait_mapped()
            return Nccl()

    def join(nccl: Nccl, environment: RankEnvironment, unique_id: bytes) -> Communicator:
        with timeline.span("communicator: init"):
            driver = _driver_in_use()
            communicator = Communicator(nccl, driver, environment.size, environment.rank, unique_id)
        with timeline.span("communicator: first uses"):
            communicator.use_once(*first_uses(environment.size))
        return communicator

    return EarlyCommunicator(environment, open_library, join)


def _driver_in_use() -> CudaLibrary:
    """The driver, with this process's context on its GPU current on this thread. Raises: CapabilityError, InternalError."""
    from loader.cuda_library import cuda_library

    driver = cuda_library()
    driver.use_context(driver.retain_context(0))
    return driver
