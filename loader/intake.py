"""Turns the reader's records into progress, marks and errors that name files and tensors."""

from __future__ import annotations

import errno
import os

from loader import reader as wire
from loader.errors import ArtifactError, CapabilityError, InternalError, WorkerError
from loader.load_plan import LoadPlan
from loader.plan_wire import WirePlan
from loader.progress import LoadProgress
from loader.reader_link import ReaderLink
from loader.row_gather import RowDesk

Record = tuple[int, int, int, int, int, int, int, int, int, int]


class Intake:
    """Handles every record but FULL, which means something else to each transport."""

    def __init__(self, plan: LoadPlan, wire_plan: WirePlan, progress: LoadProgress, rows: RowDesk) -> None:
        self._plan = plan
        self._wire_plan = wire_plan
        self._link: ReaderLink | None = None
        self._progress = progress
        self._rows = rows
        self._bad_files: list[str] = []
        self.is_done = False

    def use(self, link: ReaderLink) -> None:
        """Records come from this reader from now on."""
        self._link = link
        self.is_done = False
        self._bad_files.clear()

    def handle(self, record: Record) -> None:
        """Raises: WorkerError: the record reports the end of the load."""
        kind, number, _, code, size, start, end, offset, extra, _ = record
        if kind == wire.HELLO:
            self._progress.mark(f"reader {extra} up", end_ns=end)
        elif kind == wire.RETRY:
            self._progress.mark(
                f"retry {extra} {_errno_name(code)} {self._wire_plan.files[number]} at {offset}", size=size
            )
        elif kind == wire.BAD_FILE:
            self._bad_files.append(self._bad_file(number, code, size))
        elif kind == wire.CHANGED:
            self._progress.mark(
                f"warning: {self._wire_plan.files[number]} was replaced or touched during the load"
            )
        elif kind == wire.STATS:
            self._progress.mark(
                f"reader used {extra} threads, waited {offset / 1e9:.3f} s for slots", size=size
            )
        elif kind == wire.GREW:
            self._progress.mark(f"storage is slow: {extra} reader threads from here on")
        elif kind == wire.DONE:
            self.is_done = True
        elif kind == wire.GATHERED:
            request = self._rows.deliver(number)
            self._progress.mark(f"rows {request.table.name}", start, end, size)
        elif kind == wire.ERROR:
            raise self._error(number, code, size, start, offset, extra)
        elif kind == wire.CRASH:
            text = self._link.crash_text() if self._link else ""
            raise InternalError(f"reader failed: {text}", where="loader.reader")
        else:
            raise InternalError("unknown record", where="loader.reader", found=kind)

    def reader_gone(self) -> WorkerError:
        """The reader's pipe ended although nobody stopped it."""
        ending = self._link.stop(grace_s=1.0, drain=True) if self._link else "never started"
        return InternalError(
            f"reader ended before its work was done: {ending}",
            where="loader.reader",
            found=f"{self._progress.arrived_bytes} of {self._plan.total_bytes} bytes",
            hint="restart the worker; exit by signal 9 often means the container is out of memory",
        )

    def _bad_file(self, number: int, code: int, size: int) -> str:
        name = self._wire_plan.files[number]
        if code:
            return f"{name}: {os.strerror(code)}"
        return f"{name}: {size} bytes instead of {self._wire_plan.sizes[number]}"

    def _error(self, number: int, code: int, size: int, start: int, offset: int, why: int) -> WorkerError:
        name = self._wire_plan.files[number] if self._wire_plan.files else "plan"
        if why == wire.WHY_SIZE and self._bad_files:
            return ArtifactError(
                "files are missing or have the wrong size",
                where="; ".join(self._bad_files),
                hint="copy the prepared directory again",
            )
        if why == wire.WHY_SIZE:
            return ArtifactError(
                "size changed during the load", where=name, found=size, expected=self._wire_plan.sizes[number]
            )
        if why == wire.WHY_SHORT:
            return ArtifactError(
                "file ends early: it was truncated after it was opened",
                where=f"{name}{self._tensors_at(number, offset)}",
                found=f"end at byte {offset}",
                expected=f"{self._wire_plan.sizes[number]} bytes",
            )
        if why == wire.WHY_EDGE:
            return ArtifactError(
                f"digest of {size} bytes at {offset} differs from the manifest",
                where=f"{name}: {self._wire_plan.tensors[start]}",
                hint="the file is damaged or belongs to another manifest",
            )
        if why == wire.WHY_BLOCK:
            return ArtifactError(
                f"digest of bytes {offset}..{offset + size} differs from the manifest",
                where=f"{name}{self._tensors_at(number, offset, size)}",
                hint="the file is damaged or belongs to another manifest",
            )
        if why == wire.WHY_FAULT:
            return CapabilityError(
                "fault injection is not allowed here",
                where="storage_fault",
                hint=f"set {wire.FAULT_VARIABLE}=1 in tests",
            )
        if why == wire.WHY_OPEN:
            return self._cannot_open(name, code, size, start)
        return InternalError(
            f"cannot read: {_errno_name(code)} ({os.strerror(code)})",
            where=f"{name}{self._tensors_at(number, offset)}",
            found=f"{size} bytes at offset {offset} still missing after {start} attempts",
        )

    def _cannot_open(self, name: str, code: int, limit: int, attempts: int) -> WorkerError:
        """`limit`: descriptors that the reader's process may have."""
        problem = f"cannot open: {_errno_name(code)} ({os.strerror(code)})"
        if code == errno.EMFILE:
            return CapabilityError(
                problem,
                where=name,
                found=f"a limit of {limit} open files (RLIMIT_NOFILE)",
                expected=f"{len(self._wire_plan.files)} files of weights and what else the process has open",
                hint="raise the limit of the container or with ulimit -n",
            )
        if code == errno.ENFILE:
            return CapabilityError(
                problem, where=name, hint="raise the host's limit of open files (fs.file-max)"
            )
        if code == errno.ENOMEM:
            return CapabilityError(problem, where=name, hint="raise the container's memory limit")
        return InternalError(problem, where=name, found=f"the same after {attempts} attempts")

    def _tensors_at(self, number: int, offset: int, size: int = 1) -> str:
        """`: name, …` of the first tensors in a range of a file."""
        names = [
            tensor.name
            for tensor in (*self._plan.tensors.values(), *self._plan.tables.values())
            if self._wire_plan.file_numbers.get(tensor.file) == number
            and tensor.file_offset < offset + size
            and offset < tensor.file_offset + tensor.stored[0]
        ]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f": {', '.join(names[:3])}{more}" if names else ""


def _errno_name(code: int) -> str:
    return errno.errorcode.get(code, f"errno {code}")
