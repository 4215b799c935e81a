"""A communicator over NCCL for the ranks of one host, made while torch is being imported. Standard library only.

The ranks meet on a UNIX socket of the first of them, which tells the others NCCL's id as soon as all have said that they can
take part. Whoever cannot says so, and then all of them leave it to torch.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

from loader.errors import CapabilityError, InternalError, WorkerError
from loader.host_link import socket_address
from runtime.native_nccl import ID_BYTES, Communicator, DeviceCalls, Nccl
from runtime.parallel.environment import RankEnvironment

_HELLO = struct.Struct("<8sII")  # magic, rank, NCCL's version or 0: it cannot take part
_MAGIC = b"cfnccl1\0"
_STEP_S = 0.01
MEET_S = 60.0  # for all ranks to come
JOIN_S = 15.0  # for the library to connect them

GATHERED_BYTES = (1 << 16, 1 << 20, 1 << 25)
EXCHANGED_BYTES = 1 << 24
"""What is moved once: NCCL takes another kernel for small, middle and large parts. The denoiser moves up to 64 and 29 MiB."""


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
        self._is_cancelled = threading.Event()
        self.problem = ""

    def make(self) -> Communicator | None:
        """The communicator, or None and `problem`. Others may have one all the same, if this rank's `join` was what failed."""
        try:
            return self._joined(self._meet())
        except Exception as error:  # noqa: BLE001 (a border: torch makes one then, whatever was wrong here)
            self.problem = str(error) or repr(error)
            return None

    def cancel(self) -> None:
        """Let `make` return soon."""
        self._is_cancelled.set()

    def _meet(self) -> bytes:
        """NCCL's id. Raises: CapabilityError: not all ranks can take part, or came in time."""
        environment, version, cause = self._environment, 0, "a rank cannot take part"
        try:
            self._nccl = self._open_library()
            version = self._nccl.version()
        except WorkerError as error:
            cause = str(error)
        address = socket_address(environment.run_id, environment.host_ranks.start) + "-nccl"
        deadline = time.monotonic() + self._meet_s
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
            end.settimeout(_STEP_S)
            if environment.local_rank == 0:
                unique_id = self._host(end, address, version, deadline)
            else:
                unique_id = self._visit(end, address, version, deadline)
        if not unique_id:
            raise CapabilityError(cause, where="early communicator", found=f"NCCL {version} here")
        return unique_id

    def _host(self, end: socket.socket, address: str, version: int, deadline: float) -> bytes:
        end.bind(address)
        end.listen(self._environment.local_size)
        with contextlib.ExitStack() as guests:
            connections: dict[int, socket.socket] = {}
            versions = {version}
            for _ in self._tries(deadline, "a rank did not come"):
                if len(connections) == self._environment.local_size - 1:
                    break
                with contextlib.suppress(TimeoutError):
                    guest = guests.enter_context(end.accept()[0])
                    magic, rank, other = _HELLO.unpack(self._receive(guest, _HELLO.size, deadline))
                    if magic == _MAGIC:
                        connections[rank] = guest
                        versions.add(other)
            is_common = len(versions) == 1
            unique_id = self._nccl.new_id() if is_common and self._nccl else b""
            for guest in connections.values():
                guest.sendall(unique_id or bytes(ID_BYTES))
        return unique_id

    def _visit(self, end: socket.socket, address: str, version: int, deadline: float) -> bytes:
        for _ in self._tries(deadline, "the first rank did not come"):
            with contextlib.suppress(ConnectionRefusedError, FileNotFoundError, TimeoutError):
                end.connect(address)
                break
            time.sleep(_STEP_S)
        end.sendall(_HELLO.pack(_MAGIC, self._environment.local_rank, version))
        unique_id = self._receive(end, ID_BYTES, deadline)
        return unique_id if any(unique_id) else b""

    def _receive(self, connection: socket.socket, count: int, deadline: float) -> bytes:
        connection.settimeout(_STEP_S)
        data = b""
        for _ in self._tries(deadline, "a rank said nothing"):
            with contextlib.suppress(TimeoutError):
                part = connection.recv(count - len(data))
                data += part
                if len(data) == count:
                    break
                if not part:
                    raise InternalError("a rank left", where="early communicator")
        return data

    def _tries(self, deadline: float, failure: str) -> Iterator[None]:
        while not self._is_cancelled.is_set() and time.monotonic() < deadline:
            yield
        cause = "the start was given up" if self._is_cancelled.is_set() else f"{failure} in time"
        raise CapabilityError(cause, where="early communicator")

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
        for _ in self._tries(time.monotonic() + self._join_s, "NCCL did not return"):
            if is_done.wait(_STEP_S):
                break
        if failed:
            raise failed[0]
        return made[0]


def early_communicator(environment: RankEnvironment) -> EarlyCommunicator:
    """That of this rank, whose libraries of torch are mapped, on the only GPU that it sees."""
    return EarlyCommunicator(environment, Nccl, join_nccl)


def join_nccl(nccl: Nccl, environment: RankEnvironment, unique_id: bytes) -> Communicator:
    """This rank's end, tried out. Raises: CapabilityError, InternalError."""
    from loader.cuda_library import cuda_library

    driver = cuda_library()
    driver.use_context(driver.retain_context(0))
    communicator = Communicator(nccl, DeviceCalls(), environment.size, environment.rank, unique_id)
    communicator.use_once(GATHERED_BYTES, EXCHANGED_BYTES)
    return communicator
