"""nvCOMP's batched ANS coder and CRC-32 through ctypes: no Python package of it, no CUDA runtime, no torch.

Structures and argument orders are those of the headers of nvCOMP 6.0 (`nvcomp/ans.h`, `nvcomp/crc32.h`,
`nvcomp/shared_types.h` in the wheel `nvidia-libnvcomp-cu13`); another release is refused at load. All calls but those
that ask for sizes only enqueue work on a stream; arrays of pointers and sizes are device memory, one 64-bit number per
piece. The library brings its own CUDA runtime, which uses the context that is current in the calling thread.
"""

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_int32, c_size_t, c_uint8, c_uint32, c_void_p

from loader.errors import CapabilityError, InternalError

LIBRARY = "nvcomp"
VERSION = "6.0"  # major and minor release of the headers that this file follows
SONAME = "libnvcomp.so.6"
PACKAGE = "nvidia-libnvcomp-cu13"
ALIGN_BYTES = 16  # the most that it asks of any buffer; checked at load
ELEMENTS = {"BF16": 10, "F16": 10, "F32": 11, "F8_E4M3": 9}  # nvcompType_t; other types are coded as bytes
_BYTES, _FROM_STREAM = 1, 0xFF  # NVCOMP_TYPE_UCHAR, NVCOMP_TYPE_BITS
_CUDA_BACKEND = 2  # NVCOMP_DECOMPRESS_BACKEND_CUDA
_ONLY_SEGMENT = 0  # nvcompCRC32OnlySegment
_STATES = (
    2  # interleaved per lane: the coder's default, named because a decoder that is told has faster kernels
)


class Properties(ctypes.Structure):
    """nvcompProperties_t"""

    _fields_ = (("version", c_uint32), ("cudart_version", c_uint32))


class AlignmentRequirements(ctypes.Structure):
    """nvcompAlignmentRequirements_t"""

    _fields_ = (("input", c_size_t), ("output", c_size_t), ("temp", c_size_t))


class CompressOptions(ctypes.Structure):
    """nvcompBatchedANSCompressOpts_t"""

    _fields_ = (
        ("type", c_int),
        ("data_type", c_int),
        ("max_sub_chunk_count", c_uint8),
        ("states_per_lane", c_uint8),
        ("histogram_reduction_log2", c_uint8),
        ("reserved", c_char * 53),
    )


class DecompressOptions(ctypes.Structure):
    """nvcompBatchedANSDecompressOpts_t"""

    _fields_ = (
        ("backend", c_int),
        ("data_type", c_int),
        ("max_sub_chunk_count", c_uint8),
        ("states_per_lane", c_uint8),
        ("skip_validate", c_uint8),
        ("reserved", c_char * 53),
    )


class Crc32Spec(ctypes.Structure):
    """nvcompCRC32Spec_t"""

    _fields_ = (
        ("poly", c_uint32),
        ("init", c_uint32),
        ("ref_in", ctypes.c_bool),
        ("ref_out", ctypes.c_bool),
        ("xorout", c_uint32),
        ("reserved", c_char * 16),
    )


class Crc32KernelConf(ctypes.Structure):
    """nvcompCRC32KernelConf_t"""

    _fields_ = (
        ("kernel_kind", c_int),
        ("bytes_per_read", c_int32),
        ("blocks_per_msg", c_int32),
        ("reserved", c_char * 20),
    )


class Crc32Options(ctypes.Structure):
    """nvcompBatchedCRC32Opts_t"""

    _fields_ = (("spec", Crc32Spec), ("kernel_conf", Crc32KernelConf), ("reserved", c_char * 64))


ARGUMENTS = {
    "nvcompGetProperties": (POINTER(Properties),),
    "nvcompBatchedANSCompressGetRequiredAlignments": (CompressOptions, POINTER(AlignmentRequirements)),
    "nvcompBatchedANSCompressGetTempSize": (
        c_size_t,  # num_chunks
        c_size_t,  # max_uncompressed_chunk_bytes
        CompressOptions,
        POINTER(c_size_t),  # temp_bytes
        c_size_t,  # max_total_uncompressed_bytes
        c_void_p,  # stream
    ),
    "nvcompBatchedANSCompressGetMaxOutputChunkSize": (c_size_t, CompressOptions, POINTER(c_size_t)),
    "nvcompBatchedANSCompressAsync": (
        c_void_p,  # device_uncompressed_chunk_ptrs
        c_void_p,  # device_uncompressed_chunk_bytes
        c_size_t,  # max_uncompressed_chunk_bytes
        c_size_t,  # num_chunks
        c_void_p,  # device_temp_ptr
        c_size_t,  # temp_bytes
        c_void_p,  # device_compressed_chunk_ptrs
        c_void_p,  # device_compressed_chunk_bytes
        CompressOptions,
        c_void_p,  # device_statuses
        c_void_p,  # stream
    ),
    "nvcompBatchedANSDecompressGetRequiredAlignments": (DecompressOptions, POINTER(AlignmentRequirements)),
    "nvcompBatchedANSDecompressGetTempSize": (
        c_size_t,  # num_chunks
        c_size_t,  # max_uncompressed_chunk_bytes
        DecompressOptions,
        POINTER(c_size_t),  # temp_bytes
        c_size_t,  # max_total_uncompressed_bytes
        c_void_p,  # stream
    ),
    "nvcompBatchedANSDecompressAsync": (
        c_void_p,  # device_compressed_chunk_ptrs
        c_void_p,  # device_compressed_chunk_bytes
        c_void_p,  # device_uncompressed_buffer_bytes
        c_void_p,  # device_uncompressed_chunk_bytes
        c_size_t,  # num_chunks
        c_void_p,  # device_temp_ptr
        c_size_t,  # temp_bytes
        c_void_p,  # device_uncompressed_chunk_ptrs
        DecompressOptions,
        c_void_p,  # device_statuses
        c_void_p,  # stream
    ),
    "nvcompBatchedCRC32GetHeuristicConf": (
        c_void_p,  # device_input_chunk_bytes
        c_size_t,  # num_chunks
        POINTER(Crc32KernelConf),
        c_size_t,  # max_input_chunk_bytes
        c_void_p,  # stream
    ),
    "nvcompBatchedCRC32Async": (
        c_void_p,  # device_input_chunk_ptrs
        c_void_p,  # device_input_chunk_bytes
        c_size_t,  # num_chunks
        c_void_p,  # device_crc32_ptr
        Crc32Options,
        c_int,  # segment_kind
        c_void_p,  # device_statuses
        c_void_p,  # stream
    ),
}


def find_library() -> str:
    """Path of the library in the first folder of `sys.path` that has the wheel, else its name for the system's search."""
    for folder in sys.path:
        path = os.path.join(folder, "nvidia", "libnvcomp", "lib64", SONAME)  # noqa: PTH118 - no pathlib in the uploader
        if os.path.isfile(path):  # noqa: PTH113
            return path
    return SONAME


def preload() -> None:
    """Map the library, so that a later `Nvcomp()` is quick; for a thread. What fails here fails there with a reason."""
    try:
        ctypes.CDLL(find_library())
    except OSError:
        return


class Nvcomp:
    """Implements `loader.codec.unpacker.PieceCodec`, and codes for prepare.

    Raises: CapabilityError: the library is missing, or of a release whose interface is not known here.
    """

    def __init__(self) -> None:
        path = find_library()
        try:
            self._library = ctypes.CDLL(path)
            for name, arguments in ARGUMENTS.items():
                getattr(self._library, name).argtypes = arguments
                getattr(self._library, name).restype = c_int
        except (OSError, AttributeError) as error:
            raise CapabilityError(
                f"coded weights need nvCOMP: {error}",
                where="codec",
                found=path,
                expected=f"{SONAME} of {PACKAGE}",
                hint="pip install 'coldframe[codec]', or prepare again with --codec none",
            ) from error
        self._library.nvcompGetStatusString.restype = c_char_p
        self.version = self._read_version()
        self._options = DecompressOptions(_CUDA_BACKEND, _FROM_STREAM)
        self._typed = {
            dtype: DecompressOptions(_CUDA_BACKEND, element, 0, _STATES)
            for dtype, element in ELEMENTS.items()
        }
        self._crc: Crc32Options | None = None
        needs = AlignmentRequirements()
        self._call("nvcompBatchedANSDecompressGetRequiredAlignments", self._options, byref(needs))
        if ALIGN_BYTES % needs.input or ALIGN_BYTES % needs.output or ALIGN_BYTES % needs.temp:
            raise InternalError(
                "nvCOMP wants more alignment than prepared pieces have",
                where="codec",
                found=f"{needs.input}, {needs.output}, {needs.temp} bytes",
                expected=f"{ALIGN_BYTES}",
            )

    def _read_version(self) -> str:
        found = Properties()
        self._call("nvcompGetProperties", byref(found))
        number = int(found.version)
        version = f"{number // 1000}.{number % 1000 // 100}.{number % 100}"
        if not version.startswith(VERSION + "."):
            raise CapabilityError(
                "nvCOMP is of another release",
                where="codec",
                found=version,
                expected=f"{VERSION}.x",
                hint=f"install {PACKAGE} as pinned, or prepare again with --codec none",
            )
        return version

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise InternalError(f"{name} failed: {self.status_text(code)}", where="nvCOMP", found=code)

    def status_text(self, code: int) -> str:
        return (self._library.nvcompGetStatusString(c_int(code)) or b"unknown status").decode()

    def scratch_bytes(self, count: int, piece_bytes: int) -> int:
        """Device memory that unpacking `count` pieces of at most `piece_bytes` needs meanwhile."""
        size = c_size_t()
        self._call(
            "nvcompBatchedANSDecompressGetTempSize", count, piece_bytes, self._options, byref(size), count * piece_bytes, None
        )  # fmt: skip
        return size.value

    def unpack(
        self,
        sources: int,
        sizes: int,
        rooms: int,
        actual: int,
        count: int,
        scratch: int,
        scratch_bytes: int,
        targets: int,
        statuses: int,
        stream: int,
        dtype: str = "",
    ) -> None:
        """Enqueue the decoding of `count` pieces.

        Args:
            sources, sizes: device arrays of addresses and bytes of the coded pieces.
            rooms, targets: of where they go; `rooms` = decoded bytes.
            actual, statuses: device arrays that receive decoded bytes (64 bits) and status codes (32 bits, 0 = well).
            dtype: type that all these pieces were coded as, "" for a mixture; it chooses a kernel and must be right.
        """
        self._call(
            "nvcompBatchedANSDecompressAsync", sources, sizes, rooms, actual, count, scratch or None, scratch_bytes,
            targets, self._typed.get(dtype, self._options), statuses, stream,
        )  # fmt: skip

    def prepare_checksum(self, count: int, piece_bytes: int) -> None:
        """Choose a kernel for `checksum` calls of about this shape; the context must be current."""
        conf = Crc32KernelConf()
        self._call("nvcompBatchedCRC32GetHeuristicConf", None, count, byref(conf), piece_bytes, None)
        spec = Crc32Spec(0x04C11DB7, 0xFFFFFFFF, True, True, 0xFFFFFFFF)
        self._crc = Crc32Options(spec, conf)

    def checksum(self, targets: int, rooms: int, count: int, sums: int, stream: int) -> None:
        """Enqueue the CRC-32 (as of zlib) of `count` ranges of device memory into the device array `sums` (32 bits)."""
        assert self._crc is not None, "prepare_checksum() comes first"
        self._call(
            "nvcompBatchedCRC32Async", targets, rooms, count, sums, self._crc, _ONLY_SEGMENT, None, stream
        )

    # -- coding: prepare only ----------------------------------------------------------------------------------

    def packing(self, dtype: str) -> CompressOptions:
        """How tensors of a safetensors type are coded."""
        return CompressOptions(0, ELEMENTS.get(dtype, _BYTES), 0, _STATES)

    def pack_scratch_bytes(self, options: CompressOptions, count: int, piece_bytes: int) -> int:
        size = c_size_t()
        self._call(
            "nvcompBatchedANSCompressGetTempSize", count, piece_bytes, options, byref(size), count * piece_bytes, None
        )  # fmt: skip
        return size.value

    def most_packed_bytes(self, options: CompressOptions, piece_bytes: int) -> int:
        """Room that one coded piece may take."""
        size = c_size_t()
        self._call("nvcompBatchedANSCompressGetMaxOutputChunkSize", piece_bytes, options, byref(size))
        return size.value

    def pack(
        self,
        options: CompressOptions,
        sources: int,
        sizes: int,
        piece_bytes: int,
        count: int,
        scratch: int,
        scratch_bytes: int,
        targets: int,
        packed: int,
        statuses: int,
        stream: int,
    ) -> None:
        """Enqueue the coding of `count` pieces; device array `packed` receives their coded bytes (64 bits)."""
        self._call(
            "nvcompBatchedANSCompressAsync", sources, sizes, piece_bytes, count, scratch or None, scratch_bytes, targets,
            packed, options, statuses, stream,
        )  # fmt: skip
