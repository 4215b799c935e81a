"""Header checks against hand-made bad files and against the reference reader."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path

import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.errors import ArtifactError
from loader.header import DTYPE_BYTES, TensorEntry, build_header, parse_header, read_header, tensor_bytes

INPUTS = Path(__file__).parents[1] / "cases" / "inputs"
CASES = {case["id"]: case for case in json.loads((INPUTS / "index.json").read_text()) if case["id"][0] == "W"}
# Valid files whose fault is in values or in what a model expects; prepare refuses those.
VALID_FILES = {"W25", "W26", "W27", "W28", "W45"}
REJECTED = [i for i, case in CASES.items() if case["expect"]["outcome"] == "reject" and i not in VALID_FILES]
PRESENT = [i for i, case in CASES.items() if (INPUTS / case["file"]).exists()]
ACCEPTED = [i for i in PRESENT if i not in REJECTED]


@pytest.mark.parametrize("case_id", REJECTED)
def test_bad_file_is_refused_by_name(case_id: str) -> None:
    case = CASES[case_id]
    with pytest.raises(ArtifactError) as caught:
        read_header(INPUTS / case["file"])
    message = str(caught.value).lower()
    assert Path(case["file"]).name in message
    assert any(word.lower() in message.replace(Path(case["file"]).name, "") for word in case["expect"]["say"])


@pytest.mark.parametrize("case_id", ACCEPTED)
def test_good_file_is_read_like_the_reference_reader(case_id: str) -> None:
    path = INPUTS / CASES[case_id]["file"]
    header = read_header(path)
    with safetensors.safe_open(path, framework="np") as reference:
        assert {entry.name for entry in header.tensors} == set(reference.keys())
        for entry in header.tensors:
            assert list(entry.shape) == reference.get_slice(entry.name).get_shape()
    assert len(header.tensors) == CASES[case_id]["expect"].get("tensors", len(header.tensors))


@pytest.mark.parametrize("case_id", ["W06", "W07", "W08", "W48"])
def test_claimed_length_is_never_allocated(case_id: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ArtifactError):
            read_header(INPUTS / CASES[case_id]["file"])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"gone\.safetensors: cannot be read"):
        read_header(tmp_path / "gone.safetensors")


@st.composite
def tensor_tables(draw: st.DrawFn) -> list[TensorEntry]:
    names = draw(
        st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=12), unique=True, max_size=8)
    )
    entries, position = [], 0
    for name in names:
        dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
        size = tensor_bytes(dtype, shape)
        entries.append(TensorEntry(name, dtype, shape, position, position + size))
        position += size
    return [entry for entry in entries if entry.name != "__metadata__"] if "__metadata__" not in names else []


@settings(max_examples=40, deadline=None)
@given(tensor_tables(), st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3))
def test_built_header_is_page_aligned_and_opens_in_the_reference_reader(
    tmp_path_factory: pytest.TempPathFactory, entries: list[TensorEntry], metadata: dict[str, str]
) -> None:
    head = build_header(entries, metadata)
    size = sum(entry.num_bytes for entry in entries)
    path = tmp_path_factory.mktemp("built") / "x.safetensors"
    path.write_bytes(head + bytes(size))
    assert len(head) % 4096 == 0
    assert sorted(read_header(path).tensors, key=lambda e: e.name) == sorted(entries, key=lambda e: e.name)
    with safetensors.safe_open(path, framework="np") as reference:
        assert set(reference.keys()) == {entry.name for entry in entries}
        assert (reference.metadata() or {}) == metadata


def test_built_header_has_known_bytes() -> None:
    head = build_header([TensorEntry("a", "F32", (2,), 0, 8)], {"format": "pt"})
    text = b'{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    assert head == (4088).to_bytes(8, "little") + text.ljust(4088)


@pytest.mark.parametrize("broken", ["name", "hole", "order"])
def test_writer_refuses_what_readers_refuse(broken: str) -> None:
    first, second = TensorEntry("a", "U8", (4,), 0, 4), TensorEntry("b", "U8", (4,), 4, 8)
    tables = {
        "name": [first, TensorEntry("a", "U8", (4,), 4, 8)],
        "hole": [first, TensorEntry("b", "U8", (4,), 5, 9)],
        "order": [second, first],
    }
    with pytest.raises(ArtifactError):
        build_header(tables[broken], {})


def test_mutated_headers_never_escape_as_other_errors() -> None:
    good = (INPUTS / CASES["W01"]["file"]).read_bytes()
    length = int.from_bytes(good[:8], "little")
    rng = random.Random(20261130)
    outcomes = set()
    for _ in range(1500):
        text = bytearray(good[8 : 8 + length])
        for _ in range(rng.randint(1, 3)):
            text[rng.randrange(length)] = rng.choice(b'0123456789-.,:"{}[]eEx \\u\xff')
        try:
            header = parse_header(bytes(text), len(good), "fuzz")
        except ArtifactError:
            outcomes.add("refused")
        else:
            outcomes.add("accepted")
            assert sum(entry.num_bytes for entry in header.tensors) == len(good) - 8 - length
    assert outcomes == {"refused", "accepted"}


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=64))
def test_random_bytes_are_refused_or_valid(data: bytes) -> None:
    try:
        header = parse_header(data, 8 + len(data), "fuzz")
    except ArtifactError:
        return
    assert header.tensors == ()
