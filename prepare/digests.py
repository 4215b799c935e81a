"""Digests of a prepared file while it is written: whole file, 16 MiB chunks of the data section, edges of tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType

from loader.manifest import CHUNK_BYTES, EDGE_BYTES

_LARGE_BYTES = 1 << 20  # handing over less costs more than it saves


@dataclass(frozen=True)
class FileDigests:
    """SHA-256 of a file, of each chunk of its data section, and of the first and last KiB of its tensors."""

    size: int
    sha256: str
    chunks: tuple[str, ...]
    edges: dict[str, tuple[str, str]]

    def to_json(self) -> dict[str, object]:
        """Form of the ledger; `from_json` reads it."""
        return {"size": self.size, "sha256": self.sha256, "chunks": self.chunks, "edges": self.edges}

    @classmethod
    def from_json(cls, value: dict[str, object]) -> FileDigests:
        size, sha256, chunks, edges = (value[key] for key in ("size", "sha256", "chunks", "edges"))
        assert isinstance(size, int)
        assert isinstance(chunks, list)
        assert isinstance(edges, dict)
        return cls(
            size, str(sha256), tuple(chunks), {name: (pair[0], pair[1]) for name, pair in edges.items()}
        )


class ChunkDigests:
    """SHA-256 of a file and of each `chunk_bytes` of its data section, fed in order.

    Both digests of a large piece are taken at the same time, in two threads (hashing holds no interpreter lock). Use as
    a context manager, which ends the threads.
    """

    def __init__(self, header: bytes, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._file = hashlib.sha256(header)
        self._chunk = hashlib.sha256()
        self._chunk_fill = 0
        self._chunks: list[str] = []
        self._pool = ThreadPoolExecutor(
            2, thread_name_prefix="sha256"
        )  # threads start with the first large piece

    def __enter__(self) -> ChunkDigests:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()

    def update(self, data: memoryview, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Data section bytes, in order. `meanwhile` is done with them at the same time; all is done on return."""
        if len(data) < _LARGE_BYTES:
            self._file.update(data)
            self._update_chunks(data)
            meanwhile()
            return
        jobs = [self._pool.submit(self._file.update, data), self._pool.submit(self._update_chunks, data)]
        try:
            meanwhile()
        finally:  # the caller will reuse the memory
            for job in jobs:
                job.result()

    def finish(self) -> tuple[str, tuple[str, ...]]:
        """(file, chunks); no update after it."""
        if self._chunk_fill:
            self._close_chunk()
        return self._file.hexdigest(), tuple(self._chunks)

    def _update_chunks(self, data: memoryview) -> None:
        while len(data):
            part = data[: self._chunk_bytes - self._chunk_fill]
            self._chunk.update(part)
            self._chunk_fill += len(part)
            if self._chunk_fill == self._chunk_bytes:
                self._close_chunk()
            data = data[len(part) :]

    def _close_chunk(self) -> None:
        self._chunks.append(self._chunk.hexdigest())
        self._chunk, self._chunk_fill = hashlib.sha256(), 0


@dataclass
class EdgeDigest:
    """SHA-256 of the first and last min(1024, bytes) bytes of one tensor, fed in order."""

    _head: bytearray = field(default_factory=bytearray)
    _tail: bytes = b""

    def update(self, data: memoryview) -> None:
        """Bytes of the tensor, in order."""
        missing = EDGE_BYTES - len(self._head)
        if missing > 0:
            self._head += data[:missing]
        self._tail = (self._tail + bytes(data[-EDGE_BYTES:]))[-EDGE_BYTES:]

    def finish(self) -> tuple[str, str]:
        """(head, tail)."""
        return edge_digest(self._head), edge_digest(self._tail)


def edge_digest(data: bytes | bytearray | memoryview) -> str:
    """SHA-256 of bytes in memory."""
    return hashlib.sha256(data).hexdigest()
