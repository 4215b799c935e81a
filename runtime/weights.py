"""How numerical code gets its weights: by group, waiting only for that group. No torch import.

`WeightSource` is what model code sees. `WeightSet` is a worker's implementation: one loader stream for the order that
the start chose, and further streams when a later request needs groups that are not there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from loader.errors import InternalError
from runtime.pipeline import Cancelled

if TYPE_CHECKING:
    from torch import Tensor

    from loader.row_gather import RowRequest
    from loader.stream import WeightStream


_LOOK_S = 0.05  # how often a wait for weights looks whether it was cancelled


class WeightSource(Protocol):
    """Weights of one prepared directory while they arrive."""

    def tensors(self, group: str) -> Mapping[str, Tensor]:
        """Wait until `group` is in place and return its tensors by their name inside the file (no component prefix).

        The tensors are views of the component's arena: read only, alive as long as any of them.
        Raises: the failure that stopped the load.
        """
        ...

    def rows(self, tensor: str, rows: Sequence[int]) -> Tensor:
        """[len(rows), ...] of a tensor that is not streamed (`component/name`), gathered from storage in order."""
        ...

    def is_ready(self, group: str) -> bool:
        """Whether `tensors(group)` would return without waiting."""
        ...


class WeightSet:
    """Groups of one prepared directory over any number of streams.

    Args:
        start_stream: starts loading the given groups and returns at once.
    """

    def __init__(self, start_stream: Callable[[Sequence[str]], WeightStream]) -> None:
        self._start_stream = start_stream
        self._streams: list[WeightStream] = []
        self._by_group: dict[str, WeightStream] = {}
        self._fetched: dict[str, RowRequest] = {}
        self._lock = threading.Lock()
        self._cancelled: threading.Event | None = None

    def ensure(self, groups: Iterable[str]) -> None:
        """Start loading those of `groups` that no stream holds yet, in the given order."""
        with self._lock:
            missing = [group for group in groups if group not in self._by_group]
            if not missing:
                return
            stream = self._start_stream(missing)
            self._streams.append(stream)
            self._by_group.update(dict.fromkeys(missing, stream))

    @contextmanager
    def cancelled_by(self, cancelled: threading.Event) -> Iterator[None]:
        """Within it waits for weights end with `Cancelled` once the event is set: on slow storage they take minutes."""
        self._cancelled = cancelled
        try:
            yield
        finally:
            self._cancelled = None

    def tensors(self, group: str) -> Mapping[str, Tensor]:
        """See `WeightSource`. Raises: pipeline.Cancelled, within `cancelled_by`."""
        stream, cancelled = self._stream_of(group), self._cancelled
        while cancelled is not None and not stream.arrives(group, _LOOK_S):
            if cancelled.is_set():
                raise Cancelled
        return stream.tensors(group)

    def fetch_rows(self, tensor: str, rows: Sequence[int]) -> None:
        """Start gathering rows that `rows` will be asked for; the last request per tensor is kept."""
        self._fetched[tensor] = self._streams[0].rows_async(tensor, rows)

    def rows(self, tensor: str, rows: Sequence[int]) -> Tensor:
        fetched = self._fetched.pop(tensor, None)
        if fetched is not None and fetched.rows == tuple(rows):
            return fetched.tensor()
        return self._streams[0].rows(tensor, rows)

    def is_ready(self, group: str) -> bool:
        return self._stream_of(group).is_ready(group)

    @property
    def streams(self) -> Sequence[WeightStream]:
        return tuple(self._streams)

    def close(self) -> None:
        """Stop all streams and free what they hold; works twice and after a failure."""
        for stream in self._streams:
            stream.close()

    def _stream_of(self, group: str) -> WeightStream:
        try:
            return self._by_group[group]
        except KeyError:
            raise InternalError("weights were asked for that no stream loads", where=group) from None
