"""Full-size prepare, dry: the same trees at tiny sizes, and the arithmetic of what fits where."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from prepare.families.minimax_h3.published import TEXT_ENCODER, TRANSFORMER, published_tensors
from scripts.bench import prepare_full
from scripts.bench.prepare_full import Components, main, measure, storage_left
from scripts.bench.prepare_parts import only_hashed, parts, pieces_that_fit, reconcile
from scripts.bench.progress import Progress
from scripts.bench.published_size import write_component
from scripts.tiny_presets import preset


def test_components_are_prepared_one_after_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_full, "storage_left", lambda folder: 100 << 30)
    left = tmp_path / "storage" / "part" / "checkpoint"  # by a run that was killed
    left.mkdir(parents=True)
    (left / "model_index.json").write_text("{")
    assert main(["--components", str(tmp_path / "storage"), "--preset", "test", "--pieces", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = [json.loads(line) for line in lines[:2]]
    assert [part["part"] for part in found] == [TRANSFORMER, TEXT_ENCODER]
    model = preset("test").model
    for part in found:
        tensors = published_tensors(model)[part["part"]]
        assert part["bytes_in"] == sum(spec.num_bytes for spec in tensors.values())
        assert all(size > 0 for size in part["bytes_out"].values())
    assert found[0]["of_these_holes"] == 0 < found[1]["of_these_holes"]
    assert list((tmp_path / "storage").iterdir()) == []


def test_parts_without_time_or_room_are_named_and_not_begun(tmp_path: Path) -> None:
    late = Components(tmp_path / "late", "test", 1, Progress(0))
    late.run()
    figures = late.figures()
    assert figures["complete"] is False
    assert figures["parts"] == []
    assert [(missing["part"], missing["failed"].split(",")[0]) for missing in figures["missing"]] == [
        (part.name, f"takes about {part.predicted_s:.0f} s") for part in parts("test", 1)
    ]
    narrow = Components(tmp_path / "narrow", "test", 1, Progress(1e6), free_bytes=lambda folder: 10**9)
    narrow.run()
    assert [missing["failed"] for missing in narrow.figures()["missing"]] == [
        f"needs {part.room_bytes / 1e9:.1f} GB of storage and memory, 1.0 are free"
        for part in parts("test", 1)
    ]


@pytest.mark.parametrize(
    ("is_memory", "available", "left"),
    [
        (True, 50 << 30, 44 << 30),
        (True, 5 << 30, 0),
        (True, 500 << 30, 100 << 30),
        (False, 5 << 30, 100 << 30),
    ],
)
def test_storage_in_memory_is_not_larger_than_the_memory(
    is_memory: bool, available: int, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """6 GiB stay for the processes."""
    monkeypatch.setattr(prepare_full, "_is_memory_backed", lambda folder: is_memory)
    monkeypatch.setattr(prepare_full, "memory", lambda file, key: available)
    monkeypatch.setattr(prepare_full.shutil, "disk_usage", lambda folder: SimpleNamespace(free=100 << 30))
    assert storage_left(Path("anywhere")) == left


def test_memory_backed_storage_is_known_by_its_mount() -> None:
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text("utf-8").splitlines()]
    kinds = {mount: kind for mount, kind in mounts if mount in ("/dev/shm", "/proc")}
    for mount, kind in kinds.items():
        assert prepare_full._is_memory_backed(Path(mount)) == (kind == "tmpfs")


def test_released_parts_fit_into_the_machine_and_the_time_they_were_planned_for() -> None:
    planned = parts("full", 1)
    assert max(part.room_bytes for part in planned) < 110e9
    assert sum(part.predicted_s for part in planned) < 300


def test_a_prepare_that_fails_or_hangs_leaves_a_reason(tmp_path: Path) -> None:
    assert measure(tmp_path / "nothing", tmp_path / "prepared", 1 << 20)["failed"] == "exit code 1"
    found = measure(tmp_path / "nothing", tmp_path / "prepared", 1 << 20, limit_s=0.01)
    assert found["failed"] == "out of time after 0 s"


def test_writing_stops_at_its_deadline(tmp_path: Path) -> None:
    (part, *_) = parts("test", 1)
    with pytest.raises(TimeoutError, match="random weights"):
        part.write(tmp_path, deadline=time.monotonic())


def test_released_sizes_are_covered_and_reconciled() -> None:
    """66.28 + 66.71 = 133.0 GB in; 40.1 + 48.8 GB needed by a start, as the design states."""
    whole = {
        name: sum(spec.num_bytes for spec in published_tensors(preset("full").model)[name].values())
        for name in (TRANSFORMER, TEXT_ENCODER)
    }
    written = {
        part.component: sum(
            s.num_bytes for s in published_tensors(part.config.model)[part.component].values()
        )
        for part in parts("full", 1)
    }
    assert written[TEXT_ENCODER] == whole[TEXT_ENCODER] == 66_714_780_128
    assert written[TRANSFORMER] == pytest.approx(
        whole[TRANSFORMER], rel=1e-3
    )  # text and latents are narrower
    run = {"write_s": 1, "prepare_s": 2, "validate_s": 3}
    runs = [
        run | {"bytes_in": written[TRANSFORMER], "bytes_out": {"transformer": 40_085_000_000}},
        run | {"bytes_in": written[TEXT_ENCODER], "bytes_out": {"text_encoder": 48_760_065_536}},
    ]
    found = reconcile(runs, "full")
    assert found["in_over_published"] == pytest.approx(1, abs=1e-3)
    assert found["out_over_planned"]["text_encoder"] == pytest.approx(1, abs=1e-4)
    assert found["out_over_planned"]["transformer"] == pytest.approx(1, abs=2e-3)
    planned = found["planned"]
    assert planned["prepared"]["transformer"] / 1e9 == pytest.approx(40.2, abs=0.1)
    assert planned["prepared"]["text_encoder"] / 1e9 == pytest.approx(48.8, abs=0.1)
    assert whole[TRANSFORMER] - planned["projections_replaced_by_tables"] == pytest.approx(40.14e9, rel=1e-3)
    assert found["sums"]["prepare_s"] == 4


@pytest.mark.parametrize(("gigabytes", "pieces"), [(110, 1), (108, 2), (64, 2), (42, 3), (18, 9)])
def test_transformer_is_cut_where_it_does_not_fit(gigabytes: int, pieces: int) -> None:
    assert pieces_that_fit("full", gigabytes * 10**9) == pieces
    (*transformer, _) = parts("full", pieces)
    assert max(part.room_bytes for part in transformer) <= gigabytes * 10**9


def test_pieces_have_all_layers() -> None:
    layers = [part.config.model.transformer.num_layers for part in parts("full", 3)[:-1]]
    assert sum(layers) == 50
    assert max(layers) - min(layers) == 1


def test_holes_read_as_zeros(tmp_path: Path) -> None:
    (*_, part) = parts("test", 1)
    full, sparse = tmp_path / "full", tmp_path / "sparse"
    for folder, holes in ((full, ()), (sparse, only_hashed(part.config.model))):
        write_component(folder, TEXT_ENCODER, part.config, holes)
    names = sorted(path.name for path in (full / TEXT_ENCODER).glob("*.safetensors"))
    left, right = (
        b"".join((folder / TEXT_ENCODER / name).read_bytes() for name in names) for folder in (full, sparse)
    )
    assert len(left) == len(right)
    assert left != right
    assert all(b in (a, 0) for a, b in zip(left, right, strict=True))
