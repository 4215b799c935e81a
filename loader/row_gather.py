"""Single rows of tables that are not streamed: asked for over the reader's control pipe, no torch needed for bytes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from loader import reader as wire
from loader.errors import InternalError, WorkerError
from loader.load_plan import PlanTensor
from loader.plan_wire import WirePlan, table_edges
from loader.reader_link import ReaderLink

if TYPE_CHECKING:
    from loader.torch_api import Tensor


_Data = bytes  # inside RowRequest, `bytes` is a property


class RowRequest:
    """Rows on their way. `bytes` and `tensor()` wait for them and raise what stopped them."""

    def __init__(self, table: PlanTensor, rows: Sequence[int], device: str) -> None:
        self.table = table
        self.rows = tuple(rows)
        self.unique = sorted(set(rows))
        self.place = 0
        self._device = device
        self._done = threading.Event()
        self._data = b""
        self._failure: WorkerError | None = None

    @property
    def row_bytes(self) -> int:
        return self.table.bytes // self.table.shape[0]

    def is_ready(self) -> bool:
        return self._done.is_set()

    @property
    def bytes(self) -> _Data:
        """The rows in the order asked for, repeated where they were."""
        self._done.wait()
        if self._failure is not None:
            raise self._failure
        return self._data

    def tensor(self) -> Tensor:
        """[len(rows), …] on the stream's device. Imports torch."""
        from loader import torch_api

        shape = (len(self.rows), *self.table.shape[1:])
        return torch_api.tensor_from_bytes(self.bytes, self.table.dtype, shape, self._device)

    def deliver(self, data: _Data) -> None:
        """`data`: the unique rows, ascending."""
        size = self.row_bytes
        if list(self.rows) == self.unique:
            self._data = data
        else:
            place = {row: index * size for index, row in enumerate(self.unique)}
            self._data = b"".join(data[place[row] : place[row] + size] for row in self.rows)
        self._done.set()

    def fail(self, error: WorkerError) -> None:
        self._failure = error
        self._done.set()


class RowDesk:
    """Everything that is said to a reader: numbers row requests, gives each its place in the rows memory, and matches
    the answers; passes on other messages.

    All of it waits here while there is no reader yet (`use` has not been called), and a reader that replaces another
    hears it again.
    """

    def __init__(self, wire_plan: WirePlan) -> None:
        self._link: ReaderLink | None = None
        self._wire_plan = wire_plan
        self._lock = threading.Lock()
        self._waiting: dict[int, RowRequest] = {}
        self._next_id = 0
        self._next_place = 0
        self._failure: WorkerError | None = None
        self._told: list[int] = []

    def tell(self, kind: int) -> None:
        """A message without payload."""
        with self._lock:
            self._told.append(kind)
            if self._link is not None:
                self._link.send(kind)

    def use(self, link: ReaderLink) -> None:
        """Ask this reader from now on, also for what another one has not answered."""
        with self._lock:
            self._link = link
            for kind in self._told:
                link.send(kind)
            for number, request in self._waiting.items():
                link.send(wire.GATHER, self._message(number, request))

    def ask(self, table: PlanTensor, rows: Sequence[int], device: str) -> RowRequest:
        """Send a request. Raises: InternalError: a row number outside the table."""
        if not table.shape:
            raise InternalError("a scalar has no rows", where=table.name)
        bad = [row for row in rows if not 0 <= row < table.shape[0]]
        if bad:
            limit = f"0..{table.shape[0] - 1}"
            raise InternalError("row is outside the table", where=table.name, found=bad[:5], expected=limit)
        request = RowRequest(table, rows, device)
        if not request.unique or not request.row_bytes:
            request.deliver(b"")
            return request
        with self._lock:
            if self._failure is not None:
                raise self._failure
            number = self._next_id
            self._next_id = (number + 1) % 2**32
            request.place = self._next_place
            self._next_place += len(request.unique) * request.row_bytes
            self._waiting[number] = request
            if self._link is not None:
                self._link.send(wire.GATHER, self._message(number, request))
        return request

    def deliver(self, number: int) -> RowRequest:
        """An answer is in the rows memory."""
        with self._lock:
            assert self._link is not None, "an answer needs a reader"
            request = self._waiting.pop(number)
            data = self._link.take_rows(request.place, len(request.unique) * request.row_bytes)
            if not self._waiting:
                self._next_place = 0  # nobody's rows are there: start over instead of growing
        request.deliver(data)
        return request

    def fail(self, error: WorkerError) -> None:
        """No more answers: every request, waiting or new, gets `error`."""
        with self._lock:
            self._failure = self._failure or error
            waiting, self._waiting = list(self._waiting.values()), {}
        for request in waiting:
            request.fail(error)

    def _message(self, number: int, request: RowRequest) -> bytes:
        table = request.table
        file = self._wire_plan.file_numbers[table.file]
        edges = table_edges(table, file, self._wire_plan.tensors.index(table.name))
        head = wire.ROWS.pack(
            number, file, table.file_offset, request.row_bytes, request.place, len(request.unique),
            len(edges) // wire.EDGE.size,
        )  # fmt: skip
        return head + edges + b"".join(row.to_bytes(8, "little") for row in request.unique)
