"""Plain safetensors files, written by the reference writer, through the whole loader."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loader.errors import ArtifactError
from loader.header import PAD_PREFIX, TensorEntry, build_header
from loader.plain_files import plan_files
from loader.stream import start
from tests.loader.rungs import RUNGS, Rung, raw_bytes

INPUTS = Path(__file__).parents[1] / "cases" / "inputs"
CASES = {case["id"]: case for case in json.loads((INPUTS / "index.json").read_text())}
TREES = ["T02", "T03", "T04", "T05", "T06", "T07", "T08", "T09", "T11", "T12", "T14"]


def odd_tensors(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(7, 33, generator=g),
        "flag": torch.rand(13, generator=g) > 0.5,
        "b": torch.randn(129, 65, generator=g).bfloat16(),
        "none": torch.empty(0, 3),
        "c": torch.randint(-100, 100, (11,), generator=g, dtype=torch.int8),
        "d": torch.randn((), generator=g).double(),
        "half": torch.randn(3, 3, generator=g).half(),
        "f8": torch.randn(17, 5, generator=g).to(torch.float8_e4m3fn),
        "f8e5": torch.randn(2, generator=g).to(torch.float8_e5m2),
        "ids": torch.arange(70, dtype=torch.int64),
    }


def even_tensors() -> dict[str, torch.Tensor]:
    return {f"t{i}": torch.full((64 * (i + 1),), float(i)) for i in range(5)}


@pytest.mark.parametrize("name", RUNGS)
@pytest.mark.parametrize("seed", [0, 1])
def test_unaligned_files_arrive_aligned(tmp_path: Path, name: str, seed: int) -> None:
    tensors = odd_tensors(seed)
    save_file(tensors, tmp_path / "x.safetensors")
    reference = load_file(tmp_path / "x.safetensors")
    plan = plan_files(tmp_path, chunk_bytes=4096)
    assert plan.is_moved
    rung = Rung(name)
    with rung.start(plan, tmp_path) as stream:
        state = stream.state_dict()
        found = rung.contents(stream)
        assert all(tensor.data_ptr() % 16 == 0 for tensor in state.values() if tensor.numel())
        assert any("unaligned" in mark.name for mark in stream.marks())
        assert {n: (t.dtype, t.shape) for n, t in state.items()} == {
            n: (t.dtype, t.shape) for n, t in reference.items()
        }
        del state
    assert found == {n: raw_bytes(t) for n, t in reference.items()}
    rung.finish()


def test_aligned_files_keep_their_layout(tmp_path: Path) -> None:
    save_file(even_tensors(), tmp_path / "x.safetensors")
    plan = plan_files(tmp_path)
    assert not plan.is_moved
    assert [len(chunk.pieces) for chunk in plan.chunks] == [5]
    with start(plan, tmp_path) as stream:
        for tensor_name, tensor in even_tensors().items():
            assert torch.equal(stream.tensor(tensor_name), tensor)


def test_a_group_with_many_ranges_counts_a_chunk_once(tmp_path: Path) -> None:
    save_file(odd_tensors(0), tmp_path / "x.safetensors")
    plan = plan_files(tmp_path, group_of=lambda name: name[0])
    assert all(len(set(chunk.groups)) == len(chunk.groups) for chunk in plan.chunks)
    assert len(plan.chunks[0].pieces) > 1


def test_selection_and_groups(tmp_path: Path) -> None:
    save_file(even_tensors(), tmp_path / "x.safetensors")
    plan = plan_files(
        tmp_path,
        select=lambda name: name != "t2",
        group_of=lambda name: "odd" if int(name[1]) % 2 else "even",
    )
    assert [(group.name, group.tensors) for group in plan.groups] == [
        ("even", ("t0", "t4")),
        ("odd", ("t1", "t3")),
    ]
    with start(plan, tmp_path) as stream:
        assert list(stream.tensors("odd")) == ["t1", "t3"]
        assert torch.equal(stream.tensor("t4"), even_tensors()["t4"])


def write_spans(path: Path) -> bytes:
    """Small tensors around a MiB that nobody needs, with filler between two of them; the data section."""
    sizes = [
        ("a", 512),
        ("b", 256),
        ("big", 1 << 20),
        ("c", 768),
        (PAD_PREFIX + "0", 3328),
        ("d", 256),
        ("e", 1024),
        ("f", 256),
    ]
    entries, end = [], 0
    for name, size in sizes:
        entries.append(TensorEntry(name, "U8", (size,), end, end + size))
        end += size
    data = random.Random(5).randbytes(end)
    path.write_bytes(build_header(entries, {}) + data)
    return data


def test_the_arena_has_no_room_for_what_is_not_selected(tmp_path: Path) -> None:
    """Spans begin on the next page; where that is further away than the distance in the file, they keep this."""
    data = write_spans(tmp_path / "x.safetensors")
    plan = plan_files(tmp_path, select=lambda name: name not in ("big", "e"))
    places = {name: tensor.arena_offset for name, tensor in plan.tensors.items()}
    assert places == {"a": 0, "b": 512, "c": 4096, "d": 8192, "f": 9472}
    assert plan.arena_bytes == 12288
    assert plan.total_bytes == 512 + 256 + 768 + 256 + 256
    with start(plan, tmp_path) as stream:
        found = {name: raw_bytes(tensor) for name, tensor in stream.state_dict().items()}
    big = 768 + (1 << 20)
    assert found == {
        "a": data[:512],
        "b": data[512:768],
        "c": data[big : big + 768],
        "d": data[big + 4096 : big + 4352],
        "f": data[big + 5376 :],
    }


def test_without_a_selection_the_arena_is_the_data_section(tmp_path: Path) -> None:
    write_spans(tmp_path / "x.safetensors")
    plan = plan_files(tmp_path)
    start_of_data = plan.files[0].data_start
    assert all(t.arena_offset == t.file_offset - start_of_data for t in plan.tensors.values())
    assert [(run.offset - start_of_data, run.bytes) for run in plan.runs] == [
        (t.arena_offset, t.bytes) for t in plan.tensors.values()
    ]
    assert plan.arena_bytes == 1056768  # 1054976 bytes in pages


def test_index_of_two_shards(tmp_path: Path) -> None:
    tensors = odd_tensors(3)
    halves = [dict(list(tensors.items())[:4]), dict(list(tensors.items())[4:])]
    for number, half in enumerate(halves):
        save_file(half, tmp_path / f"s{number}.safetensors")
    index = {
        "weight_map": {name: f"s{number}.safetensors" for number, half in enumerate(halves) for name in half}
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "unrelated.safetensors").write_bytes(b"")
    with start(plan_files(tmp_path), tmp_path) as stream:
        state = stream.state_dict()
    assert {n: raw_bytes(t) for n, t in state.items()} == {n: raw_bytes(t) for n, t in tensors.items()}


@pytest.mark.parametrize("case_id", TREES)
def test_bad_trees_are_refused(case_id: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        plan_files(INPUTS / CASES[case_id]["file"])
    words = [*CASES[case_id]["expect"]["say"], "cannot be read", "not in the index"]
    assert any(word.lower() in str(caught.value).lower() for word in words)


@pytest.mark.parametrize("name", ["x\0y.safetensors", "\ud800.safetensors", "/x", "../x"])
def test_bad_paths_in_an_index_are_named_with_their_entry(tmp_path: Path, name: str) -> None:
    index = {"weight_map": {"good": "a.safetensors", "bad": name}}
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ArtifactError) as caught:
        plan_files(tmp_path)
    assert caught.value.where == "m.safetensors.index.json: weight_map: 'bad'"
    assert caught.value.found == repr(name)


@pytest.mark.parametrize("kind", [Path, str])
def test_good_tree_is_loaded(kind: type) -> None:
    directory = kind(INPUTS / CASES["T01"]["file"])
    with start(plan_files(directory), directory) as stream:
        assert len(stream.state_dict()) == 5


def test_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no safetensors files"):
        plan_files(tmp_path)
