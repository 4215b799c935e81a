"""What a process and its uploader process say to each other over a packet socket: a kind byte and a payload.

To the uploader: READER, where its own threads are to read, with the descriptors of plan, rows, `free`, `full` and `ctl` (see
`loader.reader`); WORK with those of an `UploadWork` (a memfd), of the ring unless it is its own, of `full` and `free`.
The end of the socket = stop; after DONE it means that the device memory was imported.
From it: CONTEXT, ARENAS with one descriptor per arena, NEWS (reader's records other than FULL, as they come), LOADED
(u64 time, then FULL records whose copies are complete), MARK, REFUSED or FAILED (an error), GONE (the reader ended), DONE.
"""

from __future__ import annotations

import struct

from loader.errors import ArtifactError, CapabilityError, InternalError, RequestError, WorkerError

TYPE_CHECKING = False  # typing costs more than everything else here, and this is on the way to the first copy
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from loader.codec.unpack_plan import UnpackPlan
    from loader.load_plan import LoadPlan

READER, WORK, CONTEXT, ARENAS, NEWS, LOADED, MARK, REFUSED, FAILED, GONE, DONE = range(11)
TIME = struct.Struct("<Q")
RECORDS_PER_PACKET = 512  # 32 KiB: fits any socket buffer
PACKET_BYTES = 1 << 16
MOST_FDS = 250  # the kernel's limit is 253 in one packet

_ERRORS: Mapping[str, type[WorkerError]] = {
    kind.kind: kind for kind in (RequestError, ArtifactError, CapabilityError, InternalError)
}


class UploadWork:
    """What an uploader process needs to know of a plan. (No dataclass: its import costs the process 10 ms.)

    Args:
        arenas: their bytes.
        chunks: per chunk its pieces (offset, bytes, arena, arena offset) and the groups that it touches.
        missing: per group the number of its chunks.
        keep: free slots that the reader should have at most, once the first ones have come back.
        unpack: what unpacking takes, None where nothing is coded.
        may_shrink: whether slots that cannot be pinned may leave the ring.
    """

    def __init__(
        self,
        arenas: list[int],
        chunks: list[tuple[list[tuple[int, int, int, int]], list[int]]],
        missing: list[int],
        slots: int,
        slot_bytes: int,
        keep: int,
        reserve_bytes: int,
        unpack: UnpackPlan | None = None,
        may_shrink: bool = True,
    ) -> None:
        self.arenas = arenas
        self.chunks = chunks
        self.missing = missing
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.keep = keep
        self.reserve_bytes = reserve_bytes
        self.unpack = unpack
        self.may_shrink = may_shrink

    def encode(self) -> bytes:
        """JSON on one line; a piece table follows as it is."""
        if self.unpack is None:
            return _dump(vars(self))
        value, table = self.unpack.to_wire()
        return _dump({**vars(self), "unpack": value}) + b"\n" + table


def decode_work(data: bytes) -> UploadWork:
    text, _, table = data.partition(b"\n")
    value = _load(text)
    if value["unpack"] is not None:
        from loader.codec.unpack_plan import unpack_plan_from_wire

        value["unpack"] = unpack_plan_from_wire(value["unpack"], table)
    return UploadWork(**value)


def work_of(
    plan: LoadPlan,
    slots: int,
    slot_bytes: int,
    keep: int,
    reserve_bytes: int,
    staging_slots: int | None = None,
    may_shrink: bool = True,
) -> UploadWork:
    """The uploader's part of `plan`."""
    unpack = None
    if plan.codec is not None:
        from loader.codec.unpack_plan import unpack_plan_of

        unpack = unpack_plan_of(plan, slot_bytes, staging_slots)
    return UploadWork(
        arenas=[arena.bytes for arena in plan.arenas],
        chunks=[(list(chunk.pieces), list(chunk.groups)) for chunk in plan.chunks],
        missing=[len(group.chunks) for group in plan.groups],
        slots=slots,
        slot_bytes=slot_bytes,
        keep=keep,
        reserve_bytes=reserve_bytes,
        unpack=unpack,
        may_shrink=may_shrink,
    )


def encode_mark(name: str, start_ns: int, end_ns: int, size: int = 0) -> bytes:
    return _dump([name, start_ns, end_ns, size])


def decode_mark(data: bytes) -> tuple[str, int, int, int]:
    name, start, end, size = _load(data)
    return str(name), int(start), int(end), int(size)


def encode_error(error: WorkerError) -> bytes:
    parts = (error.message, error.where, error.found, error.expected, error.hint)
    return _dump([error.kind, *(None if part is None else str(part) for part in parts)])


def decode_error(data: bytes) -> WorkerError:
    kind, message, where, found, expected, hint = _load(data)
    return _ERRORS.get(kind, InternalError)(message, where=where, found=found, expected=expected, hint=hint)


def _dump(value: object) -> bytes:
    import json  # here, because the uploader process starts its context first

    return json.dumps(value, separators=(",", ":")).encode()


def _load(data: bytes) -> Any:
    import json

    return json.loads(data)
