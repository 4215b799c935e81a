"""The uploader as a process of its own: an import in the parent cannot hold it up, nor it the import.

It makes a context while the parent still plans, reads files with threads of its own into a private ring (or finds them in
a ring that it shares with another process), allocates device memory that the parent imports, and copies full slots into
it (`loader.upload_loop`). Afterwards the context goes, and the reader stays for as long as the parent wants rows.

Standard library and `cuda.bindings` only. The end of the socket means: stop at the safe point and go.
"""

from __future__ import annotations

import mmap
import os
import select
import sys
import threading
import time
from collections import abc  # noqa: F401 - Python 3.13.0 loses names of it when two threads import it at once
from importlib import import_module

from loader import reader as wire
from loader import upload_wire as talk
from loader.errors import CapabilityError, InternalError, WorkerError
from loader.upload_post import Post, Refused, Stop

TYPE_CHECKING = False  # the typing module costs as much as everything else here
if TYPE_CHECKING:
    import socket

    from loader.driver import Driver
    from loader.prefault import Prefault


class Opening:
    """The context, made by a thread from the first moment on. `fd` becomes readable when it is there or has failed."""

    def __init__(self, factory: str, ordinal: int) -> None:
        self._factory = factory
        self._ordinal = ordinal
        self.fd, self._done = os.pipe()
        self.start_ns = time.monotonic_ns()
        self.end_ns = 0
        self.driver: Driver | None = None
        self.context = 0
        self._failure: WorkerError | None = None
        threading.Thread(target=self._run, name="context", daemon=True).start()

    def _run(self) -> None:
        try:
            self.driver, self.context = self._open()
        except WorkerError as error:
            self._failure = error
        except Exception as error:  # noqa: BLE001 - border of a thread: reported to the parent
            self._failure = InternalError(f"no CUDA context: {error!r}", where="loader.upload_process")
        self.end_ns = time.monotonic_ns()
        os.close(self._done)

    def _open(self) -> tuple[Driver, int]:
        if self._factory:
            driver = _faked_driver(self._factory)
            return driver, driver.retain_context(self._ordinal)
        return open_beside_import(self._ordinal)

    def take(self) -> Driver:
        """After `fd` became readable; the context is current in the calling thread then. Raises: Refused."""
        os.close(self.fd)
        if self._failure is not None or self.driver is None:
            raise Refused(self._failure or InternalError("no driver", where="loader.upload_process"))
        self.driver.use_context(self.context)
        return self.driver


def open_beside_import(ordinal: int) -> tuple[Driver, int]:
    """The driver and the device's primary context, made while `cuda.bindings` is being imported (40 ms).

    Raises: CapabilityError, InternalError.
    """
    from loader.cuda_library import cuda_library

    made: list[Driver] = []
    failures: list[BaseException] = []

    def import_driver() -> None:
        try:
            from loader.driver import CudaDriver

            made.append(CudaDriver())
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    thread = threading.Thread(target=import_driver, name="driver", daemon=True)
    thread.start()
    try:
        context = cuda_library().retain_context(ordinal)
    finally:
        thread.join()
    if failures:
        raise failures[0]
    return made[0], context


def _faked_driver(factory: str) -> Driver:
    """In tests: what `module:function` returns."""
    if os.environ.get(wire.FAULT_VARIABLE) != "1":
        raise CapabilityError(
            "fault injection is not allowed here",
            where="uploader_driver",
            hint=f"set {wire.FAULT_VARIABLE}=1 in tests",
        )
    module, _, function = factory.partition(":")
    driver: Driver = getattr(import_module(module), function)()
    return driver


class OwnReader:
    """The reader as threads of this process, its ring in private memory. At work once this returns.

    Args:
        fds: of plan, rows, `free`, `full` and `ctl`.
    Raises: Refused: no memory for the ring.
    """

    def __init__(self, fds: list[int]) -> None:
        from loader.host_memory import first_touch, page_bytes, private_memory

        plan_fd, rows_fd, free, full, ctl = fds
        self._reader = wire.reader_of(free, full, ctl, rows_fd, plan_fd)
        plan = wire.receive_plan(self._reader, plan_fd)
        try:
            self.memory: mmap.mmap | None = private_memory(plan.pool_bytes)
        except OSError as error:
            text = f"no ring of {plan.pool_bytes} bytes: {error}"
            raise Refused(InternalError(text, where="uploader process")) from error
        self._reader.untouched = set(range(plan.pool_bytes // plan.slot_bytes))
        self._thread = threading.Thread(
            target=self._reader._guard, args=(self._reader.serve, plan, memoryview(self.memory)), daemon=True
        )
        self._thread.start()
        self._reader.touch = first_touch(self.memory, page_bytes())  # the first reads need not wait for it

    def wait(self) -> None:
        """Until the parent wants nothing more of it."""
        self._thread.join()


def _receive(sock: socket.socket) -> tuple[int, list[int]]:
    """(kind, descriptors) of the next packet. Raises: Stop."""
    import socket

    data, fds, _, _ = socket.recv_fds(sock, talk.PACKET_BYTES, talk.MOST_FDS, socket.MSG_CMSG_CLOEXEC)
    if not data:
        raise Stop
    return data[0], fds


def _read_work(fd: int) -> talk.UploadWork:
    work = talk.decode_work(os.pread(fd, os.fstat(fd).st_size, 0))
    os.close(fd)
    return work


def _wait_for(opening: Opening, sock: socket.socket) -> Driver:
    poll = select.poll()
    poll.register(opening.fd, select.POLLIN)
    poll.register(sock.fileno(), select.POLLIN)
    ready = {fd for fd, _ in poll.poll()}
    if opening.fd not in ready:
        os._exit(0)  # told to stop while the driver starts, which nothing can interrupt
    return opening.take()


def _serve(sock: socket.socket, post: Post, opening: Opening, ordinal: int) -> None:
    from contextlib import suppress

    from loader.budget import RingChoice
    from loader.ring import Ring
    from loader.slots import SlotStack
    from loader.upload_loop import Upload

    kind, fds = _receive(sock)
    reader = None
    if kind == talk.READER:
        reader = OwnReader(fds)
        kind, fds = _receive(sock)
    work_fd, *ring_fd, full, free = fds
    work = _read_work(work_fd)
    memory = _shared_memory(ring_fd[0], work) if reader is None else reader.memory
    assert memory is not None, "nobody has taken it yet"
    if work.unpack is not None:
        work.unpack.prepare(lambda: opening.end_ns > 0)
    driver = _wait_for(opening, sock)
    post.send(talk.MARK, talk.encode_mark("uploader: cuda context", opening.start_ns, opening.end_ns))
    prefault = _start_prefault(memory, work) if reader is None else None
    ring = Ring(driver, memory, RingChoice(work.slots, work.slot_bytes, ""), "register", work.may_shrink)
    del memory  # it goes with the ring
    upload = Upload(
        driver, opening.context, ordinal, work, (full, free), ring, SlotStack(work.slots, work.keep), post
    )
    try:
        upload.run(sock)
    except BaseException:
        upload.close(is_failed=True)
        raise
    if reader is not None:
        reader.memory = None
    upload.close()
    name, start_ns, pinned = upload.pinned
    if prefault is not None:
        prefault.stop()
        name += f", mapped {prefault.mapped_bytes} bytes ahead in {prefault.seconds:.3f} s"
    post.mark(name, start_ns, pinned)
    post.send(talk.DONE)
    post.wait_empty()
    sock.recv(1)  # the end: what was not imported must not go before
    with suppress(WorkerError):  # a context that stays goes with the process; rows may be wanted before
        driver.release_context(ordinal)
    if reader is not None:
        reader.wait()


def _shared_memory(fd: int, work: talk.UploadWork) -> mmap.mmap:
    memory = mmap.mmap(fd, work.slots * work.slot_bytes)
    os.close(fd)
    return memory


def _start_prefault(memory: mmap.mmap, work: talk.UploadWork) -> Prefault:
    """Not before the context is there: both want this process's memory map, and a context takes twice as long then."""
    from loader.prefault import Prefault

    return Prefault(memory, work.slot_bytes)


def main(arguments: list[str]) -> None:
    """Entry. Arguments: descriptor of the socket, parent's pid or 0, device ordinal, driver factory of tests or ""."""
    import _signal  # type: ignore[import-not-found]  # the public module spends 8 ms on its enums
    import gc

    gc.disable()  # a collection would hold up readers and copies alike, and this process makes no cycles that matter
    _signal.signal(_signal.SIGINT, _signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    fd, parent, ordinal = map(int, arguments[:3])
    opening = Opening(arguments[3], ordinal)
    if parent:
        wire._die_with_parent(parent)
    import socket

    sock = socket.socket(fileno=fd)
    post = Post(sock)
    code = 0
    try:
        _serve(sock, post, opening, ordinal)
    except (Stop, wire.Stop):
        pass
    except EOFError:
        code = _last_words(post, talk.GONE)
    except Refused as refused:
        code = _last_words(post, talk.REFUSED, refused.error)
    except WorkerError as error:
        code = _last_words(post, talk.FAILED, error)
    except Exception as error:  # noqa: BLE001 - border of the process: reported to the parent
        failure = InternalError(f"uploader failed: {error!r}", where="loader.upload_process")
        code = _last_words(post, talk.FAILED, failure)
    if not opening.end_ns:
        os._exit(code)  # a library that is being initialised aborts a process that ends as usual
    sys.exit(code)


def _last_words(post: Post, kind: int, error: WorkerError | None = None) -> int:
    """The exit code: 1 if the parent is gone and did not hear them."""
    try:
        post.send(kind, talk.encode_error(error) if error else b"")
        post.wait_empty()
    except Stop:
        return 1
    return 0
