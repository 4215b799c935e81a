"""The ctypes interface of nvCOMP against the headers of its wheel, and what of the library runs without a GPU."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from loader.codec import nvcomp
from loader.codec.nvcomp import ARGUMENTS, Nvcomp, find_library
from loader.errors import CapabilityError

STRUCTS = {
    "nvcompProperties_t": nvcomp.Properties,
    "nvcompAlignmentRequirements_t": nvcomp.AlignmentRequirements,
    "nvcompBatchedANSCompressOpts_t": nvcomp.CompressOptions,
    "nvcompBatchedANSDecompressOpts_t": nvcomp.DecompressOptions,
    "nvcompCRC32Spec_t": nvcomp.Crc32Spec,
    "nvcompCRC32KernelConf_t": nvcomp.Crc32KernelConf,
    "nvcompBatchedCRC32Opts_t": nvcomp.Crc32Options,
}
SIMPLE = {
    "size_t": ctypes.c_size_t,
    "uint8_t": ctypes.c_uint8,
    "uint32_t": ctypes.c_uint32,
    "int32_t": ctypes.c_int32,
    "bool": ctypes.c_bool,
    "cudaStream_t": ctypes.c_void_p,
}


@pytest.fixture(scope="module")
def headers() -> str:
    """The wheel's headers without comments."""
    folder = Path(find_library()).parent.parent / "include"
    assert folder.is_dir(), "the test dependencies have nvidia-libnvcomp-cu13"
    files = [
        folder / "nvcomp.h",
        *(folder / "nvcomp" / name for name in ("ans.h", "crc32.h", "shared_types.h", "version.h")),
    ]
    text = "\n".join(path.read_text("utf-8") for path in files)
    return re.sub(r"//.*", "", re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL))


def _type(declaration: str, is_argument: bool) -> Any:
    """ctypes class of `type name` as C declares it; enums are ints."""
    text = re.sub(r"\bconst\b", "", declaration).strip()
    array = re.search(r"\[(\d+)\]", text)
    if array:
        return ctypes.c_char * int(array[1])
    name = text.split()[0].rstrip("*")
    if "*" in text:
        if name in STRUCTS:
            return ctypes.POINTER(STRUCTS[name])
        is_host_result = re.search(r"\b(temp_bytes|max_compressed_chunk_bytes)$", text)
        return ctypes.POINTER(ctypes.c_size_t) if is_host_result and is_argument else ctypes.c_void_p
    return STRUCTS.get(name) or SIMPLE.get(name) or ctypes.c_int


def _parameters(headers: str, function: str) -> list[str]:
    match = re.search(rf"\b{function}\s*\((.*?)\)\s*;", headers, flags=re.DOTALL)
    assert match, function
    return [" ".join(part.split()) for part in match[1].split(",")]


@pytest.mark.parametrize("name", STRUCTS)
def test_structure_has_the_headers_fields(headers: str, name: str) -> None:
    (body,) = re.findall(rf"typedef struct\s*\{{([^{{}}]*)\}}\s*{name};", headers)
    fields = [" ".join(part.split()) for part in body.split(";") if part.strip()]
    found = [(re.sub(r"\[\d+\]", "", text).split()[-1], _type(text, is_argument=False)) for text in fields]
    assert found == [(field, kind) for field, kind, *_ in STRUCTS[name]._fields_]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_function_takes_the_headers_arguments(headers: str, name: str) -> None:
    assert [_type(text, is_argument=True) for text in _parameters(headers, name)] == list(ARGUMENTS[name])


def test_constants_are_the_headers(headers: str) -> None:
    numbers = {name: int(value, 0) for name, value in re.findall(r"(\w+) = (0x[0-9a-f]+|\d+)\b", headers)}
    assert {
        "BF16": numbers["NVCOMP_TYPE_FLOAT16"],
        "F16": numbers["NVCOMP_TYPE_FLOAT16"],
        "F32": numbers["NVCOMP_TYPE_FLOAT32"],
        "F8_E4M3": numbers["NVCOMP_TYPE_FLOAT8_E4M3"],
    } == nvcomp.ELEMENTS
    assert numbers["NVCOMP_TYPE_UCHAR"] == nvcomp._BYTES
    assert numbers["NVCOMP_TYPE_BITS"] == nvcomp._FROM_STREAM
    assert numbers["NVCOMP_DECOMPRESS_BACKEND_CUDA"] == nvcomp._CUDA_BACKEND
    assert numbers["nvcompCRC32OnlySegment"] == nvcomp._ONLY_SEGMENT
    assert numbers["nvcompANSRequiredDecompressionAlignment"] == nvcomp.ALIGN_BYTES
    release = re.findall(r"#define NVCOMP_VER_(?:MAJOR|MINOR) (\d+)", headers)
    assert ".".join(release) == nvcomp.VERSION
    spec = re.search(r"nvcompCRC32_t? ?nvcompCRC32 = |nvcompCRC32Spec_t nvcompCRC32 = \{([^}]*)\{", headers)
    assert spec
    assert [word.strip() for word in spec[1].split(",")[:5]] == [
        "0x04C11DB7",
        "0xFFFFFFFF",
        "true",
        "true",
        "0xFFFFFFFF",
    ]


class _Recorder:
    """Stands for the library: keeps the arguments of every call."""

    def __init__(self) -> None:
        self.calls: dict[str, tuple[Any, ...]] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls[name] = arguments
            return 0

        return call


def _recorded(headers: str, library: Nvcomp, recorder: _Recorder, name: str) -> dict[str, Any]:
    names = [re.sub(r"\W", "", text.split()[-1]) for text in _parameters(headers, name)]
    return dict(zip(names, recorder.calls[name], strict=True))


def test_arguments_go_where_the_header_wants_them(headers: str) -> None:
    library, recorder = Nvcomp(), _Recorder()
    library._library = recorder  # type: ignore[assignment]
    library.unpack(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    assert _recorded(headers, library, recorder, "nvcompBatchedANSDecompressAsync") == {
        "device_compressed_chunk_ptrs": 1,
        "device_compressed_chunk_bytes": 2,
        "device_uncompressed_buffer_bytes": 3,
        "device_uncompressed_chunk_bytes": 4,
        "num_chunks": 5,
        "device_temp_ptr": 6,
        "temp_bytes": 7,
        "device_uncompressed_chunk_ptrs": 8,
        "decompress_opts": library._options,
        "device_statuses": 9,
        "stream": 10,
    }
    for dtype, element in nvcomp.ELEMENTS.items():
        library.unpack(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, dtype)
        options = _recorded(headers, library, recorder, "nvcompBatchedANSDecompressAsync")["decompress_opts"]
        coding = library.packing(dtype)
        assert (options.data_type, options.states_per_lane) == (element, 2)
        assert (coding.data_type, coding.states_per_lane) == (element, 2)
    library.unpack(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, "U8")
    assert (
        _recorded(headers, library, recorder, "nvcompBatchedANSDecompressAsync")["decompress_opts"].data_type
        == 0xFF
    )
    library.prepare_checksum(5, 4096)
    found = _recorded(headers, library, recorder, "nvcompBatchedCRC32GetHeuristicConf")
    assert (found["device_input_chunk_bytes"], found["num_chunks"], found["max_input_chunk_bytes"]) == (
        None,
        5,
        4096,
    )
    library.checksum(1, 2, 3, 4, 5)
    found = _recorded(headers, library, recorder, "nvcompBatchedCRC32Async")
    assert [
        found[name] for name in ("device_input_chunk_ptrs", "device_input_chunk_bytes", "num_chunks")
    ] == [1, 2, 3]
    assert [found[name] for name in ("device_crc32_ptr", "segment_kind", "device_statuses", "stream")] == [
        4,
        0,
        None,
        5,
    ]
    options = library.packing("BF16")
    library.pack(options, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    assert _recorded(headers, library, recorder, "nvcompBatchedANSCompressAsync") == {
        "device_uncompressed_chunk_ptrs": 1,
        "device_uncompressed_chunk_bytes": 2,
        "max_uncompressed_chunk_bytes": 3,
        "num_chunks": 4,
        "device_temp_ptr": 5,
        "temp_bytes": 6,
        "device_compressed_chunk_ptrs": 7,
        "device_compressed_chunk_bytes": 8,
        "compress_opts": options,
        "device_statuses": 9,
        "stream": 10,
    }
    library.scratch_bytes(3, 4096)
    found = _recorded(headers, library, recorder, "nvcompBatchedANSDecompressGetTempSize")
    assert (found["num_chunks"], found["max_uncompressed_chunk_bytes"]) == (3, 4096)
    assert found["max_total_uncompressed_bytes"] == 3 * 4096


def test_library_answers_without_a_gpu() -> None:
    """Structures by value arrive: the room for a coded piece depends on the type named in one."""
    library = Nvcomp()
    assert library.version.startswith("6.0.")
    assert "decompress" in library.status_text(12)
    rooms = {
        dtype: library.most_packed_bytes(library.packing(dtype), 1 << 18) for dtype in ("BF16", "F32", "U8")
    }
    assert len(set(rooms.values())) == 3
    assert all(1 << 18 < room < 1 << 19 for room in rooms.values())
    assert library.scratch_bytes(768, 1 << 18) < 1 << 24


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(nvcomp, "SONAME", "libnvcomp.so.404")
    with pytest.raises(
        CapabilityError, match=r"codec: coded weights need nvCOMP: .*coldframe\[codec\].*--codec none"
    ):
        Nvcomp()
