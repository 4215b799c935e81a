"""The index of compiled kernels: what each cubin is, and the checks that one belongs to this program.

    {"format": "coldframe-kernels/1", "kernels": [entry, …]}

An entry has the fields of `KernelEntry`. The same entries stand in a prepared directory's manifest, key `kernels`.
Standard library only.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from kernels.catalog import ARCHITECTURES, OPERATORS, source_sha256
from loader.errors import ArtifactError

FORMAT = "coldframe-kernels/1"
INDEX_NAME = "index.json"

# Above this a launch needs an opt-in attribute; no kernel of the catalog comes near.
MAX_SHARED_BYTES = 48 * 1024

_FIELD_KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("constants", "compiler"), dict),
    "arguments": (list, tuple),
    **dict.fromkeys(("operator", "architecture", "symbol", "grid", "file", "sha256", "source_sha256"), str),
    **dict.fromkeys(("block", "rows", "num_warps", "num_ctas", "shared", "scratch", "size"), int),
    **dict.fromkeys(("registers", "stack_bytes"), (int, type(None))),
}


@dataclass(frozen=True)
class KernelEntry:
    """One cubin.

    operator, architecture, constants: the key. symbol: entry point. arguments: (name, type, multiple) in parameter
    order, without the two scratch pointers that Triton appends. block, rows, num_warps: the launch shape; grid: rule of
    the catalog. shared, scratch: bytes. file: relative to the folder of the index. source_sha256: see
    `catalog.source_sha256`. registers, stack_bytes: from the assembler's resource report, None where it is absent.
    compiler: name, version, assembler (its release), options.
    """

    operator: str
    architecture: str
    constants: Mapping[str, int]
    symbol: str
    arguments: tuple[tuple[str, str, int], ...]
    grid: str
    block: int
    rows: int
    num_warps: int
    num_ctas: int
    shared: int
    scratch: int
    file: str
    size: int
    sha256: str
    source_sha256: str
    registers: int | None
    stack_bytes: int | None
    compiler: Mapping[str, Any]

    @property
    def title(self) -> str:
        """How messages call it: `norm_modulate[D=5376] sm_90a`."""
        constants = ", ".join(f"{name}={value}" for name, value in self.constants.items())
        return f"{self.operator}[{constants}] {self.architecture}"

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def parse_entries(documents: Sequence[Mapping[str, Any]]) -> tuple[KernelEntry, ...]:
    """Entries of an index or manifest, each checked against the catalog.

    Raises: ArtifactError: fields missing or unknown, an operator or argument list this program does not have, an
    architecture outside the catalog, unsupported launch needs, other sources, or one key twice. Names the entry.
    """
    entries = tuple(_parse_entry(document) for document in documents)
    seen: dict[tuple[object, ...], KernelEntry] = {}
    for entry in entries:
        key = (entry.operator, entry.architecture, tuple(sorted(entry.constants.items())))
        if key in seen:
            raise ArtifactError("kernel is listed twice", where=entry.title, found=entry.file)
        seen[key] = entry
    return entries


def _parse_entry(document: Mapping[str, Any]) -> KernelEntry:
    if not isinstance(document, Mapping):
        raise ArtifactError("kernel entry is not an object", where="kernels", found=repr(document))
    title = f"kernel {document.get('operator', '?')!r}"
    names = {field.name for field in dataclasses.fields(KernelEntry)}
    if document.keys() != names:
        wrong = sorted(document.keys() ^ names)
        raise ArtifactError("kernel entry has missing or unknown fields", where=title, found=wrong)
    for name, kinds in _FIELD_KINDS.items():
        if not isinstance(document[name], kinds):
            raise ArtifactError(
                "kernel entry has a field of the wrong type",
                where=f"{title}: {name}",
                found=repr(document[name]),
            )
    fields = dict(document)
    fields["arguments"] = tuple(tuple(argument) for argument in document["arguments"])
    entry = KernelEntry(**fields)
    _check_against_catalog(entry)
    _check_launch(entry)
    return entry


def _check_against_catalog(entry: KernelEntry) -> None:
    operator = OPERATORS.get(entry.operator)
    if operator is None:
        raise ArtifactError(
            "unknown kernel", where=entry.title, found=entry.operator, expected=sorted(OPERATORS)
        )
    if entry.architecture not in ARCHITECTURES:
        raise ArtifactError(
            "unknown architecture",
            where=entry.title,
            found=entry.architecture,
            expected=sorted(ARCHITECTURES),
        )
    declared = tuple((argument.name, argument.type, argument.multiple) for argument in operator.arguments)
    if entry.arguments != declared or tuple(sorted(entry.constants)) != tuple(sorted(operator.constants)):
        raise ArtifactError(
            "kernel was compiled with other parameters",
            where=entry.title,
            found=[*entry.constants, *(name for name, _, _ in entry.arguments)],
            expected=[*operator.constants, *(name for name, _, _ in declared)],
        )
    if entry.source_sha256 != source_sha256(operator):
        raise ArtifactError(
            "kernel was compiled from other sources",
            where=entry.title,
            found=entry.source_sha256,
            expected=source_sha256(operator),
            hint="compile the kernels again with this version",
        )


def _check_launch(entry: KernelEntry) -> None:
    """Only what `Kernel.launch` does: one CTA a cluster, no scratch memory, default shared memory limit."""
    if entry.rows < 1 or (entry.rows > 1 and entry.grid != "rows"):
        raise ArtifactError("kernel has an impossible launch", where=entry.title, found=f"rows {entry.rows}")
    if entry.num_ctas != 1 or entry.scratch != 0 or entry.shared > MAX_SHARED_BYTES:
        raise ArtifactError(
            "kernel needs a launch that is not supported",
            where=entry.title,
            found=f"num_ctas {entry.num_ctas}, scratch {entry.scratch}, shared {entry.shared}",
            expected=f"num_ctas 1, scratch 0, shared up to {MAX_SHARED_BYTES}",
        )
    path = PurePosixPath(entry.file)
    if path.is_absolute() or ".." in path.parts:
        raise ArtifactError("kernel file lies outside its folder", where=entry.title, found=repr(entry.file))


def read_index(folder: Path) -> tuple[KernelEntry, ...]:
    """`folder/index.json`, as `kernels.aot.compile` writes it. Raises ArtifactError where absent or malformed."""
    path = folder / INDEX_NAME
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise ArtifactError("kernel index cannot be read", where=str(path), found=str(cause)) from cause
    is_index = isinstance(document, dict) and isinstance(document.get("kernels"), list)
    if not is_index or document.get("format") != FORMAT:
        found = document.get("format") if isinstance(document, dict) else type(document).__name__
        raise ArtifactError("not a kernel index", where=str(path), found=repr(found), expected=repr(FORMAT))
    return parse_entries(document["kernels"])


def index_bytes(entries: Iterable[KernelEntry]) -> bytes:
    """The index file: keys sorted, entries by file name, newline at the end; same entries, same bytes."""
    ordered = sorted(entries, key=lambda entry: entry.file)
    document = {"format": FORMAT, "kernels": [entry.as_dict() for entry in ordered]}
    return (json.dumps(document, sort_keys=True, indent=1) + "\n").encode()


def for_architecture(entries: Iterable[KernelEntry], architecture: str) -> tuple[KernelEntry, ...]:
    """The entries of one architecture; empty where it was not prepared."""
    return tuple(entry for entry in entries if entry.architecture == architecture)
