"""Maps a shared ring's pages into this process before they are pinned.

Pinning memory that another process fills takes one page fault for every 4 KiB (0.24 s a GiB on an H200 host), five times
as long as pinning pages that are mapped already. The kernel maps them here, many for each fault, ahead of the uploader;
a call into it through `ctypes` leaves the interpreter to others. Without any effect where the kernel cannot (before
Linux 5.14): pinning takes its time then.
"""

from __future__ import annotations

import ctypes
import threading
import time

from loader.driver import address_of

TYPE_CHECKING = False  # the typing module costs as much as everything else on the way to the first copy
if TYPE_CHECKING:
    import mmap

_POPULATE_READ = 22  # MADV_POPULATE_READ: maps pages of shared memory writable, and neighbours with them


class Prefault:
    """A thread that maps `memory` in steps, from its start to its end; begins at once.

    Attributes:
        mapped_bytes, seconds: what it has done so far. problem: why it ended early, or empty.
    """

    def __init__(self, memory: mmap.mmap, step_bytes: int) -> None:
        self.mapped_bytes = 0
        self.seconds = 0.0
        self.problem = ""
        self._memory: mmap.mmap | None = memory
        self._step_bytes = step_bytes
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="prefault", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it after the step in progress and wait for that. May be called again."""
        self._is_stopped = True
        self._thread.join()

    def wait(self) -> None:
        """Until everything is mapped, or it gave up."""
        self._thread.join()

    def _run(self) -> None:
        start = time.monotonic()
        memory, self._memory = self._memory, None  # it may go with its last user, once this has ended
        base, size = address_of(memory), len(memory)  # type: ignore[arg-type]
        library = ctypes.CDLL(None, use_errno=True)
        library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        while self.mapped_bytes < size and not self._is_stopped:
            step = min(self._step_bytes, size - self.mapped_bytes)
            if library.madvise(base + self.mapped_bytes, step, _POPULATE_READ):
                self.problem = f"errno {ctypes.get_errno()}"
                break
            self.mapped_bytes += step
        self.seconds = time.monotonic() - start
