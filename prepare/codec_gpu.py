"""Codes pieces on a GPU with nvCOMP and proves every one of them there: decoded, compared, its CRC-32 taken.

Bytes need not repeat: nvCOMP 6.0 codes the same array to other bytes from call to call in pieces of 64 KiB and more, and its
headers promise nothing. So nothing here or in the loader compares coded bytes with an expectation, only with digests of
what was written; what repeats is the CRC-32 of the decoded bytes.
"""

from __future__ import annotations

import threading
import zlib
from typing import TYPE_CHECKING, Any

from loader.errors import CapabilityError, InternalError
from loader.header import round_up

if TYPE_CHECKING:
    from torch import Tensor

    from loader.codec.nvcomp import CompressOptions, Nvcomp


class GpuEncoder:
    """Implements `prepare.codec.PieceEncoder`. Threads may share it: each works on a stream of its own.

    Raises: CapabilityError: no CUDA device, or nvCOMP is missing.
    """

    name = "ans"
    library = "nvcomp"

    def __init__(self, device: str = "cuda") -> None:
        import torch

        if not torch.cuda.is_available():
            raise CapabilityError(
                "weights are coded on a GPU, and there is none",
                where="--codec",
                found="ans",
                expected="none without CUDA",
                hint="prepare on a GPU machine, or with --codec none",
            )
        from loader.codec.nvcomp import Nvcomp

        self._device = torch.device(device)
        torch.zeros(1, device=self._device)  # the context that the library will find
        self._codec = Nvcomp()
        self.version = self._codec.version
        self._local = threading.local()

    def encode(
        self, data: memoryview | bytearray, dtype: str, piece_bytes: int
    ) -> tuple[list[bytes], list[int]]:
        """See `PieceEncoder`. The first piece's CRC-32 is compared with zlib's."""
        import torch

        with torch.cuda.device(self._device), torch.cuda.stream(self._stream()):
            plain = torch.frombuffer(data, dtype=torch.uint8).to(self._device)
            stream = torch.cuda.current_stream(self._device).cuda_stream
            batch = PieceBatch(self._codec, plain, dtype, piece_bytes, stream)
            coded, sizes = batch.pack()
            sums = batch.prove(coded, sizes)
            stored, lengths = coded.cpu().numpy(), sizes.tolist()
        pieces = [stored[i * batch.room : i * batch.room + size].tobytes() for i, size in enumerate(lengths)]
        if sums[0] != zlib.crc32(data[:piece_bytes]):
            raise InternalError("CRC-32 of the GPU is not zlib's", where="prepare.codec_gpu", found=sums[0])
        return pieces, sums

    def _stream(self) -> Any:
        import torch

        if not hasattr(self._local, "stream"):
            self._local.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return self._local.stream


class PieceBatch:
    """Pieces of one buffer on the device; everything is enqueued on torch's current stream, whose handle `stream` is.

    Attributes:
        room: bytes of device memory that each coded piece may take.
    """

    def __init__(
        self,
        codec: Nvcomp,
        plain: Tensor,
        dtype: str,
        piece_bytes: int,
        stream: int,
        options: CompressOptions | None = None,
    ) -> None:
        """`options`: others than those of prepare; then `dtype` is "" for `prove`."""
        self._codec, self._plain, self._piece_bytes = codec, plain, piece_bytes
        self._dtype, self._options = dtype, options or codec.packing(dtype)
        self._count = -(-plain.numel() // piece_bytes)
        self._stream = stream
        self.room = round_up(codec.most_packed_bytes(self._options, piece_bytes), 256)
        starts = range(0, plain.numel(), piece_bytes)
        self._rooms = self._lanes([min(piece_bytes, plain.numel() - start) for start in starts])

    def _lanes(self, values: list[int]) -> Tensor:
        import torch

        return torch.tensor(values, dtype=torch.int64).to(self._plain.device)

    def _addresses(self, memory: Tensor, step: int) -> Tensor:
        return self._lanes([memory.data_ptr() + number * step for number in range(self._count)])

    def _empty(self, size: int, dtype: str = "uint8") -> Tensor:
        import torch

        return torch.empty(size, dtype=getattr(torch, dtype), device=self._plain.device)

    def pack(self, fill: int = 0) -> tuple[Tensor, Tensor]:
        """(pieces at multiples of `room`, their bytes). Raises: InternalError: a piece was not coded.

        Output and scratch are set to `fill` before: bytes that the coder leaves alone are then those of no other memory.
        """
        coded, sizes = self._empty(self._count * self.room), self._empty(self._count, "int64")
        statuses = self._empty(self._count, "int32")
        scratch = self._empty(
            self._codec.pack_scratch_bytes(self._options, self._count, self._piece_bytes) or 1
        )
        coded.fill_(fill)
        scratch.fill_(fill)
        sources, targets = (
            self._addresses(self._plain, self._piece_bytes),
            self._addresses(coded, self.room),
        )
        self._codec.pack(
            self._options, sources.data_ptr(), self._rooms.data_ptr(), self._piece_bytes, self._count,
            scratch.data_ptr(), scratch.numel(), targets.data_ptr(), sizes.data_ptr(), statuses.data_ptr(), self._stream,
        )  # fmt: skip
        self._require_zero(statuses, "coded")
        return coded, sizes

    def prove(self, coded: Tensor, sizes: Tensor) -> list[int]:
        """Decode all pieces and compare; CRC-32 of each as decoded. Raises: InternalError: one differs."""
        import torch

        again = torch.full_like(self._plain, 0xA5)
        actual, statuses = self._empty(self._count, "int64"), self._empty(self._count, "int32")
        scratch = self._empty(self._codec.scratch_bytes(self._count, self._piece_bytes) or 1)
        sums = self._empty(self._count, "int32")
        sources, targets = self._addresses(coded, self.room), self._addresses(again, self._piece_bytes)
        self._codec.unpack(
            sources.data_ptr(), sizes.data_ptr(), self._rooms.data_ptr(), actual.data_ptr(), self._count,
            scratch.data_ptr(), scratch.numel(), targets.data_ptr(), statuses.data_ptr(), self._stream,
            self._dtype,
        )  # fmt: skip
        self._codec.prepare_checksum(self._count, self._piece_bytes)
        self._codec.checksum(
            targets.data_ptr(), self._rooms.data_ptr(), self._count, sums.data_ptr(), self._stream
        )
        self._require_zero(statuses, "decoded")
        if not (torch.equal(actual, self._rooms) and torch.equal(again, self._plain)):
            raise InternalError("a piece does not decode to itself", where="nvCOMP")
        return [value & 0xFFFFFFFF for value in sums.tolist()]

    def _require_zero(self, statuses: Tensor, what: str) -> None:
        bad = [code for code in statuses.tolist() if code]
        if bad:
            raise InternalError(
                f"a piece could not be {what}: {self._codec.status_text(bad[0])}",
                where="nvCOMP",
                found=bad[0],
            )
