"""`manifest.json` of a prepared directory: pinned digest, schema, every range and path checked.

Everything a start needs about files is here, so no weight file's header is parsed then. Standard library only. Records are
named tuples, here and in the plan: thousands of them, and their classes, are made on the way to the first read, and a
frozen dataclass with slots takes nine times as long to define.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from loader.errors import ArtifactError
from loader.fields import Fields
from loader.header import DTYPE_BYTES, PAGE_BYTES, TENSOR_ALIGN_BYTES, round_up, tensor_bytes
from loader.strict_json import is_path_text, load_json

if TYPE_CHECKING:
    from loader.codec.records import CodecRecord, CodedRecord

MANIFEST_NAME = "manifest.json"
FORMAT_NAME = "coldframe-manifest"
FORMAT_MAJOR = 1
CODED_MAJOR = 2  # a directory with coded weights, which readers of the first do not know
CHUNK_BYTES = 16 << 20
EDGE_BYTES = 1024
_MAX_MANIFEST_BYTES = 256 << 20


class FileRecord(NamedTuple):
    """One file of the directory. `data_start`, `chunk_bytes` are None for files that are not safetensors.

    `decoded_bytes`: of the data section if nothing in it were coded; None = nothing is.
    """

    path: str
    size: int
    sha256: str
    data_start: int | None
    chunk_bytes: int | None
    chunks: tuple[str, ...]
    decoded_bytes: int | None = None

    @property
    def data_bytes(self) -> int:
        return 0 if self.data_start is None else self.size - self.data_start

    @property
    def arena_bytes(self) -> int:
        """Bytes that the whole data section takes in an arena."""
        return self.data_bytes if self.decoded_bytes is None else self.decoded_bytes


class TensorRecord(NamedTuple):
    """One tensor. `offset` is in the data section of `file`; `head`, `tail` are SHA-256 of its first and last KiB.

    `bytes`, `head`, `tail`: as decoded. `place`: offset in the decoded data section; `offset` where nothing is coded.
    """

    name: str
    file: int
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int
    group: str | None
    head: str
    tail: str
    place: int
    coded: CodedRecord | None = None

    @property
    def stored_bytes(self) -> int:
        return self.bytes if self.coded is None else self.coded.bytes


class GroupRecord(NamedTuple):
    """What compute waits for together: a range of one file's data section, as stored and (`place`) as decoded."""

    name: str
    component: str
    file: int
    start: int
    end: int
    needed_by: str
    place: int
    place_end: int


class ComponentRecord(NamedTuple):
    """One arena. `bytes`: the data sections of its files, each rounded up to a page."""

    name: str
    files: tuple[int, ...]
    bytes: int


class ScheduleRecord(NamedTuple):
    """One prepared step schedule; sigmas are fp32 bit patterns as 8 hex digits, `evaluations` + 1 each."""

    name: str
    task: str
    path: str
    mode: str
    evaluations: int
    video_sigmas: tuple[str, ...]
    audio_sigmas: tuple[str, ...]
    condition_timesteps: tuple[object, ...]
    condition_index: tuple[int, ...]
    weights_sha256: str


class Manifest(NamedTuple):
    """A checked manifest. Mappings are read-only; `config`, `kernels`, `plans` are passed on unread."""

    sha256: str
    directory: Path
    writer: Mapping[str, object]
    model: Mapping[str, object]
    source: Mapping[str, object]
    options: Mapping[str, object]
    config: Mapping[str, object]
    layout: Mapping[str, object]
    files: tuple[FileRecord, ...]
    tensors: Mapping[str, TensorRecord]
    groups: Mapping[str, GroupRecord]
    components: Mapping[str, ComponentRecord]
    schedules: tuple[ScheduleRecord, ...]
    orders: Mapping[str, tuple[str, ...]]
    kernels: tuple[Mapping[str, object], ...]
    plans: tuple[Mapping[str, object], ...]
    codec: CodecRecord | None = None

    def order(self, task: str, schedule: str) -> tuple[str, ...]:
        """Group names of one task and schedule in order of use. Raises: ArtifactError naming what is prepared."""
        key = f"{task}/{schedule}"
        if key not in self.orders:
            raise ArtifactError(
                "not prepared",
                where=f"{MANIFEST_NAME}: orders",
                found=key,
                expected=", ".join(sorted(self.orders)),
            )
        return self.orders[key]

    def local_name(self, tensor: str) -> str:
        """Name inside the file of the tensor `component/name` (or `component/<file stem>/name`)."""
        record = self.tensors[tensor]
        return local_name(tensor, record.group)


def local_name(tensor: str, group: str | None) -> str:
    """`tensor` without its component, and without what else it shares with its group's folder."""
    folder = group.rpartition("/")[0] + "/" if group else ""
    return tensor[len(folder) :] if folder and tensor.startswith(folder) else tensor.partition("/")[2]


def arena_bytes(data_bytes: list[int]) -> int:
    """Bytes of a component whose files have data sections of these sizes."""
    return sum(round_up(size, PAGE_BYTES) for size in data_bytes)


def encode_manifest(value: Mapping[str, object]) -> bytes:
    """Canonical bytes: UTF-8, keys sorted, no insignificant whitespace, newline at the end.

    Raises: ArtifactError: a value JSON cannot hold exactly (NaN, infinity, lone surrogate, other types).
    """
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode("utf-8") + b"\n"
    except (TypeError, ValueError) as error:
        raise ArtifactError(f"cannot be written as a manifest ({error})", where=MANIFEST_NAME) from error


def read_manifest(directory: Path | str, pinned_sha256: str | None = None) -> Manifest:
    """Read, check and freeze `directory/manifest.json`.

    Args:
        directory: prepared directory.
        pinned_sha256: digest of the manifest that the deployment pins (64 hex digits); None = not pinned.
    Raises: ArtifactError: unreadable, other digest, unknown major version, or any inconsistency.
    """
    directory = Path(directory)
    path = directory / MANIFEST_NAME
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > _MAX_MANIFEST_BYTES:
                raise ArtifactError(
                    "too large", where=MANIFEST_NAME, found=size, expected=_MAX_MANIFEST_BYTES
                )
            data = file.read()
    except OSError as error:
        raise ArtifactError(
            f"cannot be read ({error.strerror})", where=str(path), hint="is this a prepared directory?"
        ) from error
    digest = hashlib.sha256(data).hexdigest()
    if pinned_sha256 is not None and digest != pinned_sha256.lower():
        raise ArtifactError(
            "digest differs from the pinned one",
            where=MANIFEST_NAME,
            found=digest,
            expected=pinned_sha256,
            hint="another version was published; pin its digest or restore the directory",
        )
    return parse_manifest(data, directory, digest)


def parse_manifest(data: bytes, directory: Path, digest: str) -> Manifest:
    """Check manifest bytes; links are resolved against `directory`. Raises: ArtifactError."""
    top = Fields(load_json(data, MANIFEST_NAME), MANIFEST_NAME)
    major = _check_format(top.text("format"))
    files = tuple(_file(item) for item in top.items("files"))
    extras = [item for name in ("kernels", "plans") for item in top.items(name) if "path" in item.raw]
    _check_paths([file.path for file in files] + [item.text("path") for item in extras], directory)
    _refuse_repeats("file", [file.path for file in files])
    codec = None
    if major == CODED_MAJOR:
        from loader.codec.records import read_codec  # here and below: most directories have nothing coded

        codec = read_codec(Fields(dict(top.mapping("codec")), f"{MANIFEST_NAME}: codec"), files, directory)
    group_list = [_group(item, files) for item in top.items("groups")]
    _refuse_repeats("group", [group.name for group in group_list])
    groups = {group.name: group for group in group_list}
    tensors = {name: _tensor(name, item, files, groups, codec) for name, item in top.entries("tensors")}
    components = {name: _component(name, item, files) for name, item in top.entries("components")}
    _check_ownership(files, tensors, groups, components)
    _check_overlaps(files, tensors, groups)
    schedules = tuple(_schedule(item) for item in top.items("schedules"))
    known = {file.path for file in files}
    for schedule in schedules:
        if schedule.path not in known:
            raise ArtifactError(
                "schedule's file is not listed", where=MANIFEST_NAME, found=repr(schedule.path)
            )
    return Manifest(
        sha256=digest,
        directory=directory,
        writer=top.mapping("writer"),
        model=top.mapping("model"),
        source=top.mapping("source"),
        options=top.mapping("options"),
        config=top.mapping("config"),
        layout=top.mapping("layout"),
        files=files,
        tensors=MappingProxyType(tensors),
        groups=MappingProxyType(groups),
        components=MappingProxyType(components),
        schedules=schedules,
        orders=MappingProxyType(
            {name: _order(name, value, groups) for name, value in top.mapping("orders").items()}
        ),
        kernels=tuple(item.raw for item in top.items("kernels")),
        plans=tuple(item.raw for item in top.items("plans")),
        codec=codec,
    )


def _check_format(text: str) -> int:
    """The major version. Raises: ArtifactError: an unknown one."""
    name, _, version = text.partition("/")
    major = version.partition(".")[0]
    if name != FORMAT_NAME or major not in (str(FORMAT_MAJOR), str(CODED_MAJOR)):
        raise ArtifactError(
            "unknown format",
            where=f"{MANIFEST_NAME}: format",
            found=repr(text),
            expected=f"{FORMAT_NAME}/{FORMAT_MAJOR} or {FORMAT_NAME}/{CODED_MAJOR} (coded)",
            hint="prepare the checkpoint again with this version",
        )
    return int(major)


def _file(item: Fields) -> FileRecord:
    path, size = item.text("path"), item.count("size")
    if item.raw.get("data_start") is None:
        for name in ("chunk_bytes", "chunks"):
            if item.raw.get(name) is not None:
                raise item.error(name, item.raw[name], "null, because data_start is null")
        return FileRecord(path, size, item.digest("sha256"), None, None, ())
    start, chunk_bytes = item.count("data_start"), item.count("chunk_bytes")
    if start % PAGE_BYTES or not PAGE_BYTES <= start <= size:
        raise item.error(
            "data_start", start, f"a multiple of {PAGE_BYTES} inside the {size} bytes of the file"
        )
    if chunk_bytes % PAGE_BYTES or not chunk_bytes:
        raise item.error("chunk_bytes", chunk_bytes, f"a multiple of {PAGE_BYTES}, usually {CHUNK_BYTES}")
    chunks = item.digests("chunks")
    expected = -(-(size - start) // chunk_bytes)
    if len(chunks) != expected:
        raise item.error("chunks", f"{len(chunks)} digests", f"{expected} for {size - start} bytes of data")
    decoded = None if item.raw.get("decoded_bytes") is None else item.count("decoded_bytes")
    return FileRecord(path, size, item.digest("sha256"), start, chunk_bytes, chunks, decoded)


def _check_paths(paths: list[str], directory: Path) -> None:
    """Refuse paths that leave the directory, by their text or through links."""
    root = os.path.realpath(directory)
    for path in paths:
        parts = path.split("/")
        if not is_path_text(path):
            raise ArtifactError("path is no text that names a file", where=MANIFEST_NAME, found=repr(path))
        if "\\" in path or not all(part.strip(". ") for part in parts):
            raise ArtifactError(
                "path is absolute or points outside the directory",
                where=MANIFEST_NAME,
                found=repr(path),
                expected="a plain relative path",
            )
        real = os.path.realpath(os.path.join(root, path))  # noqa: PTH118 - pathlib is ten times slower here
        if os.path.commonpath([root, real]) != root:
            raise ArtifactError(
                "link leads outside the prepared directory",
                where=path,
                found=real,
                expected=f"a file under {root}",
            )


def _file_index(item: Fields, files: tuple[FileRecord, ...]) -> int:
    index = item.count("file")
    if index >= len(files) or files[index].data_start is None:
        raise item.error("file", index, "the index of a safetensors file")
    return index


def _group(item: Fields, files: tuple[FileRecord, ...]) -> GroupRecord:
    name, component = item.text("name"), item.text("component")
    index = _file_index(item, files)
    start, end = item.count("start"), item.count("end")
    if not name.startswith(component + "/"):
        raise item.error("name", repr(name), f"'{component}/…'")
    if start % PAGE_BYTES or not start < end <= files[index].data_bytes:
        raise item.error(
            "start, end",
            f"{start}, {end}",
            f"start a multiple of {PAGE_BYTES}, start < end <= {files[index].data_bytes}",
        )
    place, place_end = start, end
    if files[index].decoded_bytes is not None:
        place, place_end = item.count("place"), item.count("place_end")
        if place % PAGE_BYTES or not place < place_end <= files[index].arena_bytes:
            raise item.error("place", f"{place}..{place_end}", f"pages inside {files[index].arena_bytes}")
    return GroupRecord(name, component, index, start, end, item.text("needed_by"), place, place_end)


def _tensor(
    name: str,
    item: Fields,
    files: tuple[FileRecord, ...],
    groups: Mapping[str, GroupRecord],
    codec: CodecRecord | None,
) -> TensorRecord:
    index, dtype, shape = _file_index(item, files), item.text("dtype"), item.counts("shape")
    offset, size = item.count("offset"), item.count("bytes")
    if "/" not in name:
        raise item.error("name", repr(name), "'component/name'")
    if dtype not in DTYPE_BYTES:
        raise item.error("dtype", repr(dtype), ", ".join(DTYPE_BYTES))
    if tensor_bytes(dtype, shape) != size:
        raise item.error("bytes", size, f"{tensor_bytes(dtype, shape)} for {dtype} {list(shape)}")
    coded = None
    if item.raw.get("coded") is not None:
        from loader.codec.records import read_coded

        coded = read_coded(Fields(item.raw["coded"], f"{item.where}: coded"), offset, size, codec)
    stored = size if coded is None else coded.bytes
    if offset % TENSOR_ALIGN_BYTES or offset + stored > files[index].data_bytes:
        raise item.error(
            "offset",
            offset,
            f"a multiple of {TENSOR_ALIGN_BYTES} with all bytes inside {files[index].data_bytes}",
        )
    place = offset if files[index].decoded_bytes is None else item.count("place")
    if place % TENSOR_ALIGN_BYTES or place + size > files[index].arena_bytes:
        raise item.error("place", place, f"a multiple of {TENSOR_ALIGN_BYTES} with all bytes inside")
    group = None if item.raw.get("group") is None else item.text("group")
    if group is not None:
        owner = groups.get(group)
        if owner is None or owner.file != index or not _holds(owner, offset, stored, place, size):
            raise item.error("group", repr(group), "a group whose range holds the tensor")
    if coded is not None and (group is None or files[index].decoded_bytes is None):
        raise item.error("coded", "a table or a tensor of a file without decoded_bytes", "a streamed tensor")
    return TensorRecord(
        name, index, dtype, shape, offset, size, group, item.digest("head"), item.digest("tail"), place, coded
    )


def _holds(group: GroupRecord, offset: int, stored: int, place: int, size: int) -> bool:
    return (
        group.start <= offset <= offset + stored <= group.end
        and group.place <= place <= place + size <= group.place_end
    )


def _component(name: str, item: Fields, files: tuple[FileRecord, ...]) -> ComponentRecord:
    indexes, size = item.counts("files"), item.count("bytes")
    if len(set(indexes)) != len(indexes) or any(
        index >= len(files) or files[index].data_start is None for index in indexes
    ):
        raise item.error("files", list(indexes), "distinct indexes of safetensors files")
    expected = arena_bytes([files[index].arena_bytes for index in indexes])
    if size != expected:
        raise item.error("bytes", size, f"{expected}, the data sections rounded up to {PAGE_BYTES} each")
    return ComponentRecord(name, indexes, size)


def _check_ownership(
    files: tuple[FileRecord, ...],
    tensors: Mapping[str, TensorRecord],
    groups: Mapping[str, GroupRecord],
    components: Mapping[str, ComponentRecord],
) -> None:
    """A file belongs to one component at most, and groups and tensors lie in files of their own component."""
    owner: dict[int, str] = {}
    for component in components.values():
        for index in component.files:
            if index in owner:
                raise ArtifactError(
                    "file belongs to two components",
                    where=files[index].path,
                    found=f"{owner[index]}, {component.name}",
                )
            owner[index] = component.name
    placed = [(group.name, group.component, group.file) for group in groups.values()]
    placed += [(tensor.name, tensor.name.partition("/")[0], tensor.file) for tensor in tensors.values()]
    for name, component_name, index in placed:
        if owner.get(index) != component_name:
            raise ArtifactError(
                "lies in a file of another component",
                where=f"{MANIFEST_NAME}: {name}",
                found=f"{files[index].path} ({owner.get(index)})",
                expected=component_name,
            )


def _check_overlaps(
    files: tuple[FileRecord, ...], tensors: Mapping[str, TensorRecord], groups: Mapping[str, GroupRecord]
) -> None:
    spans = {
        "tensors": [
            (t.file, t.offset, t.offset + t.stored_bytes, t.name) for t in tensors.values() if t.bytes
        ],
        "groups": [(g.file, g.start, g.end, g.name) for g in groups.values()],
    }
    if any(file.decoded_bytes is not None for file in files):
        spans["decoded tensors"] = [
            (t.file, t.place, t.place + t.bytes, t.name) for t in tensors.values() if t.bytes
        ]
        spans["decoded groups"] = [(g.file, g.place, g.place_end, g.name) for g in groups.values()]
    for kind, ranges in spans.items():
        ranges.sort()
        for (file, _, end, name), (next_file, start, _, next_name) in pairwise(ranges):
            if file == next_file and start < end:
                raise ArtifactError(f"{kind} overlap", where=files[file].path, found=f"{name}, {next_name}")


def _schedule(item: Fields) -> ScheduleRecord:
    evaluations = item.count("evaluations")
    mode = item.text("mode")
    if mode not in ("canonical", "match"):
        raise item.error("mode", repr(mode), "'canonical' or 'match'")
    sigmas = {name: item.hex_words(name, 8) for name in ("video_sigmas", "audio_sigmas")}
    for name, values in sigmas.items():
        if len(values) != evaluations + 1:
            raise item.error(name, f"{len(values)} values", f"{evaluations + 1}, one more than evaluations")
    return ScheduleRecord(
        name=item.text("name"),
        task=item.text("task"),
        path=item.text("path"),
        mode=mode,
        evaluations=evaluations,
        video_sigmas=sigmas["video_sigmas"],
        audio_sigmas=sigmas["audio_sigmas"],
        condition_timesteps=item.plain_list("condition_timesteps"),
        condition_index=item.counts("condition_index"),
        weights_sha256=item.digest("weights_sha256"),
    )


def _order(name: str, value: object, groups: Mapping[str, GroupRecord]) -> tuple[str, ...]:
    where = f"{MANIFEST_NAME}: orders: {name}"
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ArtifactError(
            "wrong type", where=where, found=type(value).__name__, expected="list of group names"
        )
    unknown = [item for item in value if item not in groups]
    if unknown or len(set(value)) != len(value):
        found = f"unknown {unknown[:5]}" if unknown else "a group twice"
        raise ArtifactError("order does not list known groups once", where=where, found=found)
    return tuple(value)


def _refuse_repeats(kind: str, names: list[str]) -> None:
    if len(set(names)) != len(names):
        double = next(name for name in names if names.count(name) > 1)
        raise ArtifactError(f"duplicate {kind}", where=MANIFEST_NAME, found=repr(double))
