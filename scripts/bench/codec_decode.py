"""How fast pieces are unpacked: batch and piece sizes, checksums, and what a call costs the host, two interfaces."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from loader.codec.nvcomp import Nvcomp
from loader.codec.pieces import PIECE_BYTES

_PIECES = 1536  # 384 MiB decoded
_ROUNDS = 20


def measure_decoding() -> dict[str, Any]:
    torch.zeros(1, device="cuda")
    started = time.perf_counter()
    codec = Nvcomp()
    load_s = time.perf_counter() - started
    plain = (
        (torch.randn(_PIECES * PIECE_BYTES // 2, device="cuda") * 0.02).to(torch.bfloat16).view(torch.uint8)
    )
    rows = [
        _rate(codec, plain, piece_bytes, count)
        for piece_bytes in (65536, 131072, PIECE_BYTES)
        for count in (96, 192, 384, 768, 1536)
    ]
    first = [row.pop("first_call_s") for row in rows]
    return {
        "library_load_s": round(load_s, 4),
        "first_call_s": first[0],
        "batched": rows,
        "python_codec": _python_codec(plain),
    }


class _Pieces:
    """Pieces of a device buffer, coded, with the tables that decoding wants."""

    def __init__(self, codec: Nvcomp, plain: torch.Tensor, piece_bytes: int, count: int) -> None:
        self.count, self.piece_bytes = count, piece_bytes
        self.plain = plain[: count * piece_bytes]
        options = codec.packing("BF16")
        room = -(-codec.most_packed_bytes(options, piece_bytes) // 256) * 256
        coded = torch.empty(count * room, dtype=torch.uint8, device="cuda")
        self.rooms = torch.full((count,), piece_bytes, dtype=torch.int64, device="cuda")
        sources, targets = self._lanes(self.plain, piece_bytes), self._lanes(coded, room)
        self.sizes = torch.zeros(count, dtype=torch.int64, device="cuda")
        self.statuses = torch.zeros(count, dtype=torch.int32, device="cuda")
        scratch = torch.empty(
            max(codec.pack_scratch_bytes(options, count, piece_bytes), 1), dtype=torch.uint8, device="cuda"
        )
        stream = torch.cuda.current_stream().cuda_stream
        codec.pack(
            options, sources.data_ptr(), self.rooms.data_ptr(), piece_bytes, count, scratch.data_ptr(), scratch.numel(),
            targets.data_ptr(), self.sizes.data_ptr(), self.statuses.data_ptr(), stream,
        )  # fmt: skip
        lengths = self.sizes.tolist()
        self.ratio = sum(lengths) / self.plain.numel()
        places, position = [], 0
        for length in lengths:
            places.append(position)
            position += -(-length // 128) * 128
        self.coded = torch.empty(position, dtype=torch.uint8, device="cuda")  # as close together as in a slot
        for number, (place, length) in enumerate(zip(places, lengths, strict=True)):
            self.coded[place : place + length] = coded[number * room : number * room + length]
        self.sources = torch.tensor([self.coded.data_ptr() + place for place in places]).cuda()
        self.target = torch.empty_like(self.plain)
        self.targets = self._lanes(self.target, piece_bytes)
        self.actual = torch.zeros(count, dtype=torch.int64, device="cuda")
        self.sums = torch.zeros(count, dtype=torch.int32, device="cuda")

    def _lanes(self, memory: torch.Tensor, step: int) -> torch.Tensor:
        return torch.tensor([memory.data_ptr() + number * step for number in range(self.count)]).cuda()


def _rate(codec: Nvcomp, plain: torch.Tensor, piece_bytes: int, count: int) -> dict[str, Any]:
    pieces = _Pieces(codec, plain, piece_bytes, count)
    size = codec.scratch_bytes(count, piece_bytes)
    scratch = torch.empty(max(size, 1), dtype=torch.uint8, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream

    def unpack(dtype: str = "BF16") -> None:
        codec.unpack(
            pieces.sources.data_ptr(), pieces.sizes.data_ptr(), pieces.rooms.data_ptr(), pieces.actual.data_ptr(), count,
            scratch.data_ptr(), size, pieces.targets.data_ptr(), pieces.statuses.data_ptr(), stream, dtype,
        )  # fmt: skip

    def checksum() -> None:
        codec.checksum(
            pieces.targets.data_ptr(), pieces.rooms.data_ptr(), count, pieces.sums.data_ptr(), stream
        )

    torch.cuda.synchronize()
    started = time.perf_counter()
    unpack()
    torch.cuda.synchronize()
    first = time.perf_counter() - started
    if pieces.statuses.any() or not torch.equal(pieces.target, pieces.plain):
        raise SystemExit(f"{count} pieces of {piece_bytes} bytes did not decode to themselves")
    codec.prepare_checksum(count, piece_bytes)
    decode_s, decode_host_s = _timed(unpack)
    untyped_s, _ = _timed(lambda: unpack(""))
    check_s, check_host_s = _timed(checksum)
    return {
        "piece_bytes": piece_bytes,
        "pieces": count,
        "ratio": round(pieces.ratio, 4),
        "scratch_bytes": size,
        "decode_gbps": round(pieces.plain.numel() / decode_s / 1e9, 1),
        "decode_without_a_type_gbps": round(pieces.plain.numel() / untyped_s / 1e9, 1),
        "checksum_gbps": round(pieces.plain.numel() / check_s / 1e9, 1),
        "both_gbps": round(pieces.plain.numel() / (decode_s + check_s) / 1e9, 1),
        "decode_us": round(decode_s * 1e6, 1),
        "decode_call_us": round(decode_host_s * 1e6, 1),
        "checksum_call_us": round(check_host_s * 1e6, 1),
        "first_call_s": round(first, 4),
    }


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    """(seconds on the device, seconds that the call takes the host), medians of single calls."""
    device, host = [], []
    work()
    for _ in range(_ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        begin.record()
        started = time.perf_counter()
        work()
        host.append(time.perf_counter() - started)
        end.record()
        torch.cuda.synchronize()
        device.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(device), statistics.median(host)


def _python_codec(plain: torch.Tensor) -> dict[str, Any]:
    """The same work through `nvidia.nvcomp.Codec`, one array a call; what it cannot do is said instead."""
    try:
        from nvidia import nvcomp
    except ImportError as error:
        return {"missing": str(error)}
    try:
        codec = nvcomp.Codec(algorithm="ANS", data_type="<f2", uncomp_chunk_size=PIECE_BYTES)
        result = {}
        for count in (96, 768):
            part = plain[: count * PIECE_BYTES]
            coded = codec.encode(nvcomp.as_array(part))
            torch.cuda.synchronize()
            codec.decode(coded)
            times = []
            for _ in range(_ROUNDS):
                torch.cuda.synchronize()
                started = time.perf_counter()
                again = codec.decode(coded)
                call = time.perf_counter() - started
                torch.cuda.synchronize()
                times.append((call, time.perf_counter() - started))
            same = torch.equal(torch.as_tensor(again, device="cuda").view(torch.uint8), part)
            call_s, whole_s = (statistics.median(column) for column in zip(*times, strict=True))
            result[f"{count} pieces"] = {
                "ratio": round(coded.buffer_size / part.numel(), 4),
                "gbps_with_the_call": round(part.numel() / whole_s / 1e9, 1),
                "call_us": round(call_s * 1e6, 1),
                "is_equal": bool(same),
            }
        return result
    except Exception as error:  # noqa: BLE001 - a comparison, not what is shipped
        return {"failed": repr(error)}
