"""`start` turns a plan into a WeightStream at once; the bytes arrive behind it. No torch import in here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING

from loader import reader as wire
from loader import torch_api
from loader.devices import device_ordinal
from loader.errors import InternalError
from loader.load_plan import LoadPlan
from loader.options import StreamOptions
from loader.progress import LoadMark, LoadProgress
from loader.row_gather import RowDesk, RowRequest

if TYPE_CHECKING:
    from loader.collector import Transport
    from loader.reader_link import ReaderLink
    from loader.torch_api import Module, Tensor
    from loader.uploader_link import UploaderProcess


class WeightStream:
    """Weights on their way into arenas. Methods may be called from any thread; every failure is re-raised by all.

    Tensors are views of an arena: read only, alive as long as any of them, also after `close`. On CUDA, handing out a
    group makes the calling thread's current stream wait for the group's copies.
    """

    def __init__(
        self,
        plan: LoadPlan,
        device: str,
        transport: Transport,
        progress: LoadProgress,
        rows: RowDesk,
    ) -> None:
        self.plan = plan
        self.device = device
        self._transport = transport
        self._progress = progress
        self._rows = rows
        self._group_of = {name: index for index, group in enumerate(plan.groups) for name in group.tensors}
        self._lock = threading.Lock()
        self._arena_bytes: dict[int, Tensor] = {}
        self._views: dict[str, Tensor] = {}
        self._release_sent = plan.hold is None
        self._is_closed = False

    def wait(self, group: str, cuda_stream: int | None = None) -> None:
        """Block until `group` is in place (CPU), or until its copies are enqueued and the stream is ordered after them.

        Args:
            cuda_stream: handle of the CUDA stream that will use the group; None = the current one of this thread.
        Raises: the failure that stopped the load.
        """
        index = self.plan.group_index(group)
        self._progress.wait(index)
        self._transport.order_after(index, cuda_stream)

    def wait_all(self) -> None:
        """`wait` for every group."""
        self._progress.wait_all()
        for index in range(len(self.plan.groups)):
            self._transport.order_after(index, None)

    def arrives(self, group: str, timeout_s: float) -> bool:
        """Whether `group` is ready within `timeout_s`; orders no CUDA stream. Raises: the failure that stopped the load."""
        return self._progress.wait(self.plan.group_index(group), timeout_s)

    def is_ready(self, group: str) -> bool:
        """Whether `wait(group)` would return without blocking the host."""
        return self._progress.is_ready(self.plan.group_index(group))

    def tensors(self, group: str) -> Mapping[str, Tensor]:
        """Wait for `group`; its tensors by their names inside the file (no component prefix)."""
        self.wait(group)
        names = self.plan.groups[self.plan.group_index(group)].tensors
        return MappingProxyType({self.plan.tensors[name].local_name: self._view(name) for name in names})

    def tensor(self, name: str) -> Tensor:
        """One tensor by its full name; waits for its group."""
        if name not in self._group_of:
            raise InternalError(
                "tensor is not in the plan", where=name, hint="tables are gathered: use rows()"
            )
        self.wait(self.plan.groups[self._group_of[name]].name)
        return self._view(name)

    def rows(self, tensor: str, rows: Sequence[int]) -> Tensor:
        """[len(rows), …] of a table, gathered from storage in the order asked for."""
        return self.rows_async(tensor, rows).tensor()

    def rows_async(self, tensor: str, rows: Sequence[int]) -> RowRequest:
        """Start a gather; `.bytes` is there without torch, `.tensor()` builds the tensor."""
        if tensor not in self.plan.tables:
            raise InternalError(
                "not a gathered table", where=tensor, expected=", ".join(self.plan.tables) or "none"
            )
        return self._rows.ask(self.plan.tables[tensor], rows, self.device)

    def state_dict(self, component: str | None = None) -> dict[str, Tensor]:
        """Wait for everything; full names, or the names inside the files of one component, to views."""
        self.wait_all()
        if component is None:
            return {name: self._view(name) for name in self._group_of}
        return {
            self.plan.tensors[name].local_name: self._view(name)
            for name in self._group_of
            if name.startswith(component + "/")
        }

    def assign(
        self,
        module: Module,
        component: str | None = None,
        strict: bool = True,
        rename: Callable[[str], str] | None = None,
    ) -> None:
        """Give a module built on the meta device its parameters and buffers; see `loader.torch_api.assign`."""
        torch_api.assign(module, self.state_dict(component), strict, rename)

    def release(self) -> None:
        """Let the groups behind the plan's hold be read."""
        with self._lock:
            if self._release_sent:
                return
            self._release_sent = True
        self._rows.tell(wire.RELEASE)

    def forget(self, component: str) -> None:
        """Drop the stream's own hold on a component's arena: its memory is freed with the last view of it.

        For components that are not used again, for example the conditioner before the decoders on a small card. Asking
        for its tensors afterwards is an error. On CUDA the free waits for the device.
        """
        index = next((i for i, arena in enumerate(self.plan.arenas) if arena.name == component), None)
        if index is None:
            raise InternalError("component is not in the plan", where=component)
        self._progress.wait_all()
        with self._lock:
            self._arena_bytes.pop(index, None)
            for name in [name for name in self._views if self.plan.tensors[name].arena == index]:
                del self._views[name]
        self._transport.forget(index)

    def marks(self) -> list[LoadMark]:
        """What happened so far, in order of its being noticed; times are monotonic."""
        return self._progress.marks()

    @property
    def path(self) -> str:
        """Rung of the ladder in use, "U", "A" … "E"."""
        return self._transport.path

    @property
    def failure(self) -> Exception | None:
        return self._progress.failure

    def close(self) -> None:
        """Stop reading at a safe point, end the reader, forget the arenas. May be called again and after a failure."""
        with self._lock:
            self._is_closed = True
            self._views.clear()
            self._arena_bytes.clear()
        self._transport.close()

    def __enter__(self) -> WeightStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _view(self, name: str) -> Tensor:
        tensor = self.plan.tensors[name]
        with self._lock:
            if name in self._views:
                return self._views[name]
            if self._is_closed:
                self._progress.wait_all()  # raises: closed, or what came before
            if tensor.arena not in self._arena_bytes:
                exposed = self._transport.arena(tensor.arena).expose()
                self._arena_bytes[tensor.arena] = torch_api.byte_tensor(exposed, self.device)
            view = torch_api.tensor_view(self._arena_bytes[tensor.arena], tensor)
            self._views[name] = view
            return view


def start(
    plan: LoadPlan,
    directory: Path,
    *,
    device: str = "cpu",
    options: StreamOptions | None = None,
    reader: ReaderLink | None = None,
    uploader: UploaderProcess | None = None,
) -> WeightStream:
    """Start a load and return at once.

    Args:
        directory: where the plan's relative paths are.
        device: "cpu", "cuda" or "cuda:N".
        reader: a reader from `spawn_reader`, if it was started before the plan was known; owned by the stream from here.
        uploader: likewise a process from `spawn_uploader` for the same device.
    Raises: CapabilityError: unknown device, or what was forced is not possible. InternalError: the system refuses what
        every rung needs. Nothing is left running then. What fails later is raised by the stream's methods.
    """
    try:
        return _start(plan, directory, device, options or StreamOptions(), reader, uploader)
    except BaseException as error:
        for owned in (uploader, reader):
            if owned is not None:
                owned.stop(grace_s=0.0)
                owned.close()
        if isinstance(error, OSError | RuntimeError):
            raise InternalError(f"cannot start a load: {error}", where="loader.stream") from error
        raise


def _start(
    plan: LoadPlan,
    directory: Path,
    device: str,
    options: StreamOptions,
    reader: ReaderLink | None,
    uploader: UploaderProcess | None,
) -> WeightStream:
    if device_ordinal(device) < 0:
        if uploader is not None:
            uploader.stop(grace_s=0.0)
            uploader.close()
        from loader.cpu_start import start_cpu

        return start_cpu(plan, directory, options, reader)
    from loader.device_start import start_device

    return start_device(plan, directory, device, options, reader, uploader)
