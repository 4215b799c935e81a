"""The plan's invariants, on random layouts."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.errors import ArtifactError, InternalError
from loader.load_plan import LoadPlan, plan_load, recut
from loader.manifest import Manifest, encode_manifest, parse_manifest, read_manifest
from tests.loader.prepared import SMALL_ORDER, write_prepared

PAGE = 4096


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return read_manifest(write_prepared(tmp_path_factory.mktemp("plan")).directory)


@st.composite
def manifests(draw: st.DrawFn) -> tuple[Manifest, list[str]]:
    """Manifests without files behind them: random components, files, groups, tensors, gaps, chunk sizes."""
    digest_bytes = PAGE * draw(st.integers(1, 8))
    files, groups, tensors, components = [], [], {}, {}
    for component in draw(st.sampled_from([["a"], ["a", "b"], ["a", "b", "c"]])):
        indexes, total = [], 0
        for _ in range(draw(st.integers(1, 3))):
            position = 0
            for _ in range(draw(st.integers(1, 4))):
                start, name = -(-position // PAGE) * PAGE, f"{component}/g{len(groups)}"
                position = start
                for _ in range(draw(st.integers(1, 3))):
                    position = -(-position // 256) * 256
                    size = draw(st.integers(0, 20_000))
                    tensors[f"{component}/t{len(tensors)}"] = {
                        "file": len(files), "dtype": "U8", "shape": [size], "offset": position, "bytes": size,
                        "group": name, "head": "0" * 64, "tail": "0" * 64,
                    }  # fmt: skip
                    position += size
                position = max(position, start + 1)
                groups.append(
                    {"name": name, "component": component, "file": len(files), "start": start, "end": position,
                     "needed_by": "x"}
                )  # fmt: skip
            indexes.append(len(files))
            total += -(-position // PAGE) * PAGE
            files.append(
                {"path": f"f{len(files)}", "size": PAGE + position, "data_start": PAGE, "sha256": "0" * 64,
                 "chunk_bytes": digest_bytes, "chunks": ["0" * 64] * -(-position // digest_bytes)}
            )  # fmt: skip
        components[component] = {"files": indexes, "bytes": total}
    empty: dict[str, object] = {
        "writer": {},
        "model": {},
        "source": {},
        "options": {},
        "config": {},
        "layout": {},
    }
    raw = {
        **empty, "format": "coldframe-manifest/1", "files": files, "tensors": tensors, "groups": groups,
        "components": components, "schedules": [], "orders": {}, "kernels": [], "plans": [],
    }  # fmt: skip
    names = draw(st.permutations([str(group["name"]) for group in groups]))
    return parse_manifest(encode_manifest(raw), Path("/nowhere"), ""), names[
        : draw(st.integers(1, len(names)))
    ]


def _file_bytes(plan: LoadPlan) -> list[tuple[int, int, int]]:
    return sorted((c.file, c.offset, c.offset + c.bytes) for c in plan.chunks)


@settings(max_examples=80, deadline=None)
@given(manifests(), st.integers(1, 12))
def test_plan_invariants(source: tuple[Manifest, list[str]], pages: int) -> None:
    manifest, order = source
    plan = plan_load(manifest, order, chunk_bytes=pages * PAGE)
    spans = _file_bytes(plan)
    # no byte is read twice, and every byte of every group and tensor is read
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in itertools.pairwise(spans))
    for group in plan.groups:
        covered = 0
        for index in group.chunks:
            chunk = plan.chunks[index]
            for file, start, end in group.ranges:
                if chunk.file == file:
                    covered += max(0, min(end, chunk.offset + chunk.bytes) - max(start, chunk.offset))
        assert covered == group.bytes
    # what is read besides the groups is filler of less than a page between two of them
    wanted = sum(group.bytes for group in plan.groups)
    assert wanted <= plan.total_bytes < wanted + PAGE * len(plan.groups)
    # chunks fit slots, stay in one digest block, and a group's chunks come no later than the next one needs them
    for chunk in plan.chunks:
        file = plan.files[chunk.file]
        assert 0 < chunk.bytes <= pages * PAGE
        block = (chunk.offset - file.data_start) // file.digest_bytes
        assert block == (chunk.offset + chunk.bytes - 1 - file.data_start) // file.digest_bytes == chunk.block
        assert sum(piece.bytes for piece in chunk.pieces) == chunk.bytes
    firsts = [min(chunk.groups) for chunk in plan.chunks]
    assert firsts == sorted(firsts)
    # arena places: inside, disjoint, and each tensor's bytes land in one piece where the plan says
    places = sorted(
        (p.arena, p.arena_offset, p.arena_offset + p.bytes) for c in plan.chunks for p in c.pieces
    )
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in itertools.pairwise(places))
    assert all(start >= 0 and end <= plan.arenas[arena].bytes for arena, start, end in places)
    shift = {(c.file, p.arena, p.arena_offset - c.offset - p.offset) for c in plan.chunks for p in c.pieces}
    for tensor in plan.tensors.values():
        assert (tensor.file, tensor.arena, tensor.arena_offset - tensor.file_offset) in shift
        assert tensor.arena_offset % 256 == 0
    assert all(arena.bytes % PAGE == 0 for arena in plan.arenas)
    assert set(plan.tensors) == {t.name for t in manifest.tensors.values() if t.group in order}


@settings(max_examples=20, deadline=None)
@given(manifests(), st.integers(1, 6), st.integers(1, 6))
def test_recut_equals_planning_with_that_size(
    source: tuple[Manifest, list[str]], first: int, second: int
) -> None:
    manifest, order = source
    plan = plan_load(manifest, order, chunk_bytes=first * PAGE)
    assert recut(plan, second * PAGE) == plan_load(manifest, order, chunk_bytes=second * PAGE)


def test_unneeded_group_at_the_front_takes_no_arena_space(manifest: Manifest) -> None:
    plan = plan_load(manifest, ["encoder/layers.1"])
    group = manifest.groups["encoder/layers.1"]
    assert [arena.bytes for arena in plan.arenas] == [-(-(group.end - group.start) // PAGE) * PAGE]


def test_tables_are_planned_but_not_streamed(manifest: Manifest) -> None:
    plan = plan_load(manifest, SMALL_ORDER)
    assert list(plan.tables) == ["embed/table.weight"]
    assert "embed/table.weight" not in plan.tensors


def test_plan_prints_groups_in_order(manifest: Manifest) -> None:
    text = str(plan_load(manifest, SMALL_ORDER))
    positions = [text.index(f"group {name}:") for name in SMALL_ORDER]
    assert positions == sorted(positions)


def test_hold_counts_only_chunks_before_it(manifest: Manifest) -> None:
    plan = plan_load(manifest, SMALL_ORDER, chunk_bytes=PAGE, hold="dit/prelude")
    assert {plan.chunks[i].file for i in range(plan.hold_chunk)} == {1}
    assert {plan.chunks[i].file for i in range(plan.hold_chunk, len(plan.chunks))} == {3}


@pytest.mark.parametrize(
    "groups", [["dit/nothing"], ["dit/prelude", "dit/prelude"]], ids=["unknown", "twice"]
)
def test_bad_group_lists_are_refused(manifest: Manifest, groups: list[str]) -> None:
    with pytest.raises(ArtifactError, match="groups"):
        plan_load(manifest, groups)


@pytest.mark.parametrize("size", [0, -4096, 1000])
def test_impossible_chunk_size_is_refused(manifest: Manifest, size: int) -> None:
    with pytest.raises(InternalError, match="chunk size"):
        plan_load(manifest, SMALL_ORDER, chunk_bytes=size)


def test_hold_outside_the_plan_is_refused(manifest: Manifest) -> None:
    with pytest.raises(InternalError, match="hold"):
        plan_load(manifest, ["dit/prelude"], hold="dit/blocks.0")
