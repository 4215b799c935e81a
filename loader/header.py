"""Plain safetensors headers: parse and check what a stranger wrote, build what prepare writes.

A file is 8 bytes (little-endian header length N), N bytes of JSON, then the data section. Every length is compared
with the size of the file before anything of that length is allocated. Standard library only.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from loader.errors import ArtifactError
from loader.strict_json import load_json

# Bytes per element; a name that is not here is refused.
DTYPE_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "BF16": 2,
        "F16": 2,
        "F32": 4,
        "F64": 8,
        "I64": 8,
        "I32": 4,
        "I16": 2,
        "I8": 1,
        "U8": 1,
        "BOOL": 1,
        "F8_E4M3": 1,
        "F8_E5M2": 1,
    }
)
MAX_HEADER_BYTES = 100_000_000  # the reference reader's cap
PAGE_BYTES = 4096  # data section and groups start on such a border
TENSOR_ALIGN_BYTES = 256  # tensors inside a prepared data section
PAD_PREFIX = "__pad__."  # U8 filler tensors; never handed out
_MAX_DIMS = 64
_MAX_BYTES = 2**63 - 1

_SIGNATURES = (
    (re.compile(rb"version https://git-lfs"), "a Git LFS pointer", "fetch the real file with `git lfs pull`"),
    (
        re.compile(rb"\s*<(!doctype|html|\?xml)", re.IGNORECASE),
        "an HTML page",
        "download the file itself again",
    ),
    (re.compile(rb"PK\x03\x04"), "a zip archive (torch.save, pickle)", "convert it to safetensors"),
    (re.compile(rb"\x80[\x02-\x05]"), "a pickle", "convert it to safetensors"),
    (re.compile(rb"\s*[\[{]"), "JSON text", "download the file itself again"),
    (re.compile(rb"\x1f\x8b"), "a gzip archive", "unpack it"),
)


class TensorEntry(NamedTuple):
    """One tensor of a header. `begin`, `end`: byte range in the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


class Header(NamedTuple):
    """A checked header. `tensors` lie in data order and cover the data section without a gap."""

    tensors: tuple[TensorEntry, ...]
    metadata: Mapping[str, str]
    data_start: int
    file_bytes: int

    @property
    def data_bytes(self) -> int:
        return self.file_bytes - self.data_start


def tensor_bytes(dtype: str, shape: Iterable[int]) -> int:
    """Bytes of a tensor in exact integers. `dtype` must be a key of DTYPE_BYTES."""
    total = DTYPE_BYTES[dtype]
    for dim in shape:
        total *= dim
    return total


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def read_header(path: Path, where: str | None = None) -> Header:
    """Read and check the header of one file.

    Args:
        path: the file; `where` is how messages name it (default: its name).
    Raises: ArtifactError: unreadable, not safetensors, or inconsistent; names file and tensor.
    """
    where = where or path.name
    try:
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            start = file.read(512)
            header_bytes = _header_length(start, file_bytes, where)
            file.seek(8)
            text = file.read(header_bytes)
    except OSError as error:
        raise ArtifactError(f"cannot be read ({error.strerror})", where=where) from error
    if len(text) != header_bytes:
        raise ArtifactError(
            "safetensors header is truncated", where=where, found=f"{len(text)} bytes", expected=header_bytes
        )
    return parse_header(text, file_bytes, where)


def parse_header(text: bytes, file_bytes: int, where: str) -> Header:
    """Check the JSON part of a header against the size of its file. Raises: ArtifactError."""
    table = load_json(text, f"{where}: safetensors header")
    metadata = _check_metadata(table.pop("__metadata__", {}), where)
    data_start = 8 + len(text)
    entries = [_check_entry(name, value, where) for name, value in table.items()]
    tensors = _check_cover(entries, file_bytes - data_start, where)
    return Header(tensors, MappingProxyType(metadata), data_start, file_bytes)


def build_header(tensors: Sequence[TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """Length prefix and JSON of a file that holds `tensors`, padded with spaces so that the data starts on a page.

    Args:
        tensors: in data order, contiguous from offset 0; pad tensors included.
        metadata: text to text.
    Returns: bytes whose length is a multiple of 4096; the same input gives the same bytes.
    Raises: ArtifactError: entries that a reader would refuse.
    """
    table: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    for entry in tensors:
        if entry.name in table or entry.name == "__metadata__":
            raise ArtifactError("duplicate tensor name", where=entry.name)
        table[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [entry.begin, entry.end],
        }
    text = json.dumps(table, separators=(",", ":")).encode("ascii")
    text = text.ljust(round_up(8 + len(text), PAGE_BYTES) - 8)
    data_bytes = sum(entry.num_bytes for entry in tensors)
    if len(text) > MAX_HEADER_BYTES:
        raise ArtifactError(
            "header is too large", found=len(text), expected=f"at most {MAX_HEADER_BYTES} bytes"
        )
    parsed = parse_header(text, 8 + len(text) + data_bytes, "new header")
    if parsed.tensors != tuple(tensors):
        raise ArtifactError("tensors are not in data order", where="new header")
    return len(text).to_bytes(8, "little") + text


def _header_length(start: bytes, file_bytes: int, where: str) -> int:
    if file_bytes == 0:
        raise ArtifactError("not a safetensors file: empty, 0 bytes", where=where, hint="download it again")
    length = int.from_bytes(start[:8], "little")
    plausible = file_bytes >= 8 and 0 < length <= min(MAX_HEADER_BYTES, file_bytes - 8)
    if not plausible:
        for pattern, kind, hint in _SIGNATURES:
            if pattern.match(start):
                raise ArtifactError(f"looks like {kind}, not a safetensors header", where=where, hint=hint)
    if file_bytes < 8:
        raise ArtifactError(
            "too short for a safetensors header",
            where=where,
            found=f"{file_bytes} bytes",
            expected="at least 8",
        )
    if length == 0:
        raise ArtifactError("safetensors header is empty (length 0)", where=where)
    if length > MAX_HEADER_BYTES:
        raise ArtifactError(
            "safetensors header claims an absurd length",
            where=where,
            found=length,
            expected=f"at most {MAX_HEADER_BYTES} bytes",
        )
    if length > file_bytes - 8:
        raise ArtifactError(
            "safetensors header is longer than the file: truncated",
            where=where,
            found=f"{file_bytes} bytes",
            expected=f"at least {length + 8}",
            hint="download it again",
        )
    return length


def _check_metadata(metadata: object, where: str) -> dict[str, str]:
    if not isinstance(metadata, dict):
        raise ArtifactError(
            "safetensors metadata is not an object", where=where, found=type(metadata).__name__
        )
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise ArtifactError(
                f"safetensors metadata {key!r} is not text",
                where=where,
                found=type(value).__name__,
                expected="text",
            )
    return metadata


def _check_entry(name: str, value: object, where: str) -> TensorEntry:
    place = f"{where}: {name}"
    if not _is_encodable(name):
        raise ArtifactError("safetensors tensor name is not valid Unicode", where=where, found=repr(name))
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise ArtifactError(
            "safetensors entry needs exactly dtype, shape and data_offsets", where=place, found=_short(value)
        )
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise ArtifactError(
            "safetensors dtype is unknown", where=place, found=_short(dtype), expected=", ".join(DTYPE_BYTES)
        )
    dims = _check_counts(shape, "shape", place)
    if len(dims) > _MAX_DIMS:
        raise ArtifactError(
            "safetensors shape has too many dimensions", where=place, found=len(dims), expected=_MAX_DIMS
        )
    pair = _check_counts(offsets, "data_offsets", place)
    if len(pair) != 2 or pair[0] > pair[1]:
        raise ArtifactError(
            "safetensors data offsets are not a range",
            where=place,
            found=_short(offsets),
            expected="[begin, end]",
        )
    size = tensor_bytes(dtype, dims)
    if size > _MAX_BYTES:
        raise ArtifactError(
            "safetensors shape is too big: the product overflows", where=place, found=_short(shape)
        )
    if size != pair[1] - pair[0]:
        raise ArtifactError(
            "safetensors shape does not give the bytes of the range",
            where=place,
            found=f"{pair[1] - pair[0]} bytes",
            expected=f"{size} bytes for {dtype} {list(dims)}",
        )
    return TensorEntry(name, dtype, dims, pair[0], pair[1])


def _check_counts(value: object, what: str, place: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise ArtifactError(
            f"safetensors {what.replace('_', ' ')} must be a list of integers",
            where=place,
            found=_short(value),
        )
    if any(item < 0 for item in value):
        raise ArtifactError(
            f"safetensors {what.replace('_', ' ')} is negative", where=place, found=_short(value)
        )
    return tuple(value)


def _check_cover(entries: list[TensorEntry], data_bytes: int, where: str) -> tuple[TensorEntry, ...]:
    """Sort by place; refuse holes, overlaps, and a data section that is shorter or longer than the tensors."""
    ordered = tuple(sorted(entries, key=lambda entry: (entry.begin, entry.end)))
    position = 0
    for entry in ordered:
        if entry.begin != position:
            kind = "overlap" if entry.begin < position else "leave a hole"
            raise ArtifactError(
                f"safetensors tensors {kind}",
                where=f"{where}: {entry.name}",
                found=f"offset {entry.begin}",
                expected=position,
            )
        position = entry.end
    if position > data_bytes:
        raise ArtifactError(
            "file is truncated: its size is short of the tensors' bytes (safetensors)",
            where=where,
            found=f"{data_bytes} bytes of data",
            expected=position,
            hint="download it again",
        )
    if position < data_bytes:
        raise ArtifactError(
            "trailing bytes that no tensor covers (safetensors)",
            where=where,
            found=f"{data_bytes} bytes of data",
            expected=position,
        )
    return ordered


def _is_encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
