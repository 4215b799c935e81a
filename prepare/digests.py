"""Digests of a prepared file while it is written: whole file, 16 MiB chunks of the data section, edges of tensors."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from loader.manifest import CHUNK_BYTES, EDGE_BYTES


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
    """SHA-256 of a file and of each `CHUNK_BYTES` of its data section, fed in order."""

    def __init__(self, header: bytes) -> None:
        self._file = hashlib.sha256(header)
        self._chunk = hashlib.sha256()
        self._chunk_fill = 0
        self._chunks: list[str] = []

    def update(self, data: memoryview) -> None:
        """Data section bytes, in order."""
        self._file.update(data)
        while len(data):
            part = data[: CHUNK_BYTES - self._chunk_fill]
            self._chunk.update(part)
            self._chunk_fill += len(part)
            if self._chunk_fill == CHUNK_BYTES:
                self._close_chunk()
            data = data[len(part) :]

    def finish(self) -> tuple[str, tuple[str, ...]]:
        """(file, chunks); no update after it."""
        if self._chunk_fill:
            self._close_chunk()
        return self._file.hexdigest(), tuple(self._chunks)

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
