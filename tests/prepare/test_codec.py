"""Coded directories as prepare writes them: what they decode to, resumed, checked without a GPU, and no more."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from loader.codec.pieces import UNIT_BYTES
from loader.errors import ArtifactError, CapabilityError, InternalError
from loader.load_plan import plan_load
from loader.manifest import read_manifest
from prepare.cli import prepare_main, validate_main
from prepare.codec import CodecLimits, Coding
from prepare.codec_advice import Advice, Rates, advise
from prepare.codec_directory import encode_directory
from prepare.pipeline import prepare_checkpoint
from prepare.progress import ProgressReport
from prepare.validate import validate_directory
from tests.fakes.codec import FakeEncoder, unpack
from tests.loader.rungs import Rung
from tests.prepare.conftest import OPTIONS

TreeBytes = Callable[[Path], dict[str, bytes]]
LIMITS = CodecLimits(piece_bytes=2048, min_bytes=2048, max_ratio=0.97, block_bytes=16 << 20)
CODED = replace(OPTIONS, codec="ans")


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory, diffusers_checkpoint: Path) -> Path:
    target = tmp_path_factory.mktemp("coded") / "model"
    prepare_checkpoint(diffusers_checkpoint, target, CODED, coding=Coding(FakeEncoder(), LIMITS))
    return target


def test_every_tensor_decodes_to_what_is_prepared_without_a_codec(prepared: Path, coded: Path) -> None:
    _require_plain_weights(prepared, coded)


def _require_plain_weights(prepared: Path, coded: Path) -> None:
    """A coded directory's tensors, decoded piece by piece, are those of the plain one."""
    plain, manifest = read_manifest(prepared), read_manifest(coded)
    assert manifest.codec is not None
    assert (manifest.codec.name, manifest.codec.version) == ("ans", FakeEncoder.version)
    assert set(manifest.tensors) == set(plain.tensors)
    files = {file.path: (coded / file.path).read_bytes() for file in manifest.files}
    raw = {file.path: (prepared / file.path).read_bytes() for file in plain.files}
    num_coded = 0
    for name, tensor in manifest.tensors.items():
        file, before = manifest.files[tensor.file], plain.tensors[name]
        start = (plain.files[before.file].data_start or 0) + before.offset
        wanted = raw[plain.files[before.file].path][start : start + before.bytes]
        base = (file.data_start or 0) + tensor.offset
        assert (tensor.dtype, tensor.shape, tensor.head, tensor.place) == (
            before.dtype,
            before.shape,
            before.head,
            before.offset if file.decoded_bytes is not None else tensor.offset,
        )
        if tensor.coded is None:
            assert files[file.path][base : base + tensor.bytes] == wanted
            continue
        num_coded += 1
        table, found = manifest.codec.table, b""
        for row in range(tensor.coded.row, tensor.coded.row + -(-tensor.bytes // 2048)):
            place = (file.data_start or 0) + table.places[row] * UNIT_BYTES
            piece = unpack(files[file.path][place : place + table.sizes[row]], 2048)
            assert piece is not None
            found += piece
        assert found == wanted
    assert num_coded > 20


def test_files_are_read_by_the_reference_reader(coded: Path) -> None:
    manifest = read_manifest(coded)
    for file in manifest.files:
        if file.decoded_bytes is not None:
            assert {str(value.dtype) for value in load_file(coded / file.path).values()} >= {"torch.uint8"}


def test_a_coder_that_repeats_gives_the_same_bytes(
    tmp_path: Path, diffusers_checkpoint: Path, coded: Path, tree_bytes: TreeBytes
) -> None:
    reports: list[ProgressReport] = []
    coding = Coding(FakeEncoder(), LIMITS)
    prepare_checkpoint(diffusers_checkpoint, tmp_path / "again", CODED, coding=coding, report=reports.append)
    assert max(report.done_bytes for report in reports) == reports[-1].total_bytes
    assert tree_bytes(tmp_path / "again") == tree_bytes(coded)


def test_coding_a_prepared_directory_gives_the_same_weights(
    tmp_path: Path, prepared: Path, coded: Path, tree_bytes: TreeBytes
) -> None:
    shutil.copytree(prepared, tmp_path / "plain")
    report = encode_directory(
        tmp_path / "plain", tmp_path / "coded", Coding(FakeEncoder(), LIMITS), consume=True
    )
    found, wanted = tree_bytes(tmp_path / "coded"), tree_bytes(coded)
    assert {name for name in wanted if found.get(name) != wanted[name]} == {"manifest.json"}  # options differ
    assert report.stored["transformer"] < report.plain["transformer"]
    assert report.manifest_sha256 == read_manifest(tmp_path / "coded").sha256
    assert not list((tmp_path / "plain").rglob("*.safetensors"))
    with pytest.raises(ArtifactError, match="coded already"):
        encode_directory(tmp_path / "coded", tmp_path / "twice", Coding(FakeEncoder(), LIMITS))


class _Failing(FakeEncoder):
    """Fails after some calls, as a killed prepare would stop."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def encode(self, data: memoryview, dtype: str, piece_bytes: int) -> tuple[list[bytes], list[int]]:
        self.calls -= 1
        if self.calls < 0:
            raise InternalError("stopped", where="test")
        return super().encode(data, dtype, piece_bytes)


@pytest.mark.parametrize("calls", [0, 40, 120])
def test_an_interrupted_coding_continues(
    tmp_path: Path, diffusers_checkpoint: Path, coded: Path, tree_bytes: TreeBytes, calls: int
) -> None:
    target = tmp_path / "model"
    with pytest.raises(InternalError, match="stopped"):
        prepare_checkpoint(diffusers_checkpoint, target, CODED, coding=Coding(_Failing(calls), LIMITS))
    assert not target.exists()
    result = prepare_checkpoint(diffusers_checkpoint, target, CODED, coding=Coding(FakeEncoder(), LIMITS))
    assert result.reused_files > 0
    assert tree_bytes(target) == tree_bytes(coded)


class _Restless(_Failing):
    """Never codes the same data to the same bytes or to the same size, as nvCOMP may."""

    def encode(self, data: memoryview, dtype: str, piece_bytes: int) -> tuple[list[bytes], list[int]]:
        pieces, sums = super().encode(data, dtype, piece_bytes)
        # Empty stored blocks before the stream: deflate that decodes to the same.
        return [(self.calls % 7) * b"\x00\x00\x00\xff\xff" + piece for piece in pieces], sums


def test_a_coder_that_does_not_repeat_is_resumed_to_a_sound_directory(
    tmp_path: Path, diffusers_checkpoint: Path, prepared: Path, tree_bytes: TreeBytes
) -> None:
    found = []
    for calls in (
        40,
        121,
    ):  # what an interrupted run left is kept, though this one would have coded it otherwise
        target = tmp_path / str(calls)
        with pytest.raises(InternalError, match="stopped"):
            prepare_checkpoint(diffusers_checkpoint, target, CODED, coding=Coding(_Restless(calls), LIMITS))
        coding = Coding(_Restless(10_000 + calls), LIMITS)
        assert prepare_checkpoint(diffusers_checkpoint, target, CODED, coding=coding).reused_files > 0
        _require_plain_weights(prepared, target)
        assert validate_directory(target).problems == ()
        found.append(tree_bytes(target))
    assert found[0] != found[1]


def test_a_file_replaced_but_not_yet_recorded_is_written_anew(
    tmp_path: Path, diffusers_checkpoint: Path, coded: Path, tree_bytes: TreeBytes
) -> None:
    """Killed between the two: the ledger still has the plain file's size."""
    target = tmp_path / "model"
    with pytest.raises(InternalError):
        prepare_checkpoint(diffusers_checkpoint, target, CODED, coding=Coding(_Failing(0), LIMITS))
    (name,) = [p.name for p in (coded / "weights").glob("transformer-1.*")]
    shutil.copy(coded / "weights" / name, tmp_path / ".model.partial" / "model" / "weights" / name)
    prepare_checkpoint(diffusers_checkpoint, target, CODED, coding=Coding(FakeEncoder(), LIMITS))
    assert tree_bytes(target) == tree_bytes(coded)


def test_validate_checks_all_stored_bytes_without_a_gpu(tmp_path: Path, coded: Path) -> None:
    report = validate_directory(coded)
    assert report.problems == ()
    damaged = Path(shutil.copytree(coded, tmp_path / "damaged"))
    manifest = read_manifest(coded)
    name, tensor = next((n, t) for n, t in manifest.tensors.items() if t.coded is not None)
    file = manifest.files[tensor.file]
    data = bytearray((damaged / file.path).read_bytes())
    data[(file.data_start or 0) + tensor.offset + tensor.stored_bytes // 2] ^= 1
    data[(file.data_start or 0) + tensor.offset] ^= 1
    (damaged / file.path).write_bytes(data)
    problems = "\n".join(validate_directory(damaged).problems)
    assert f"{file.path}: SHA-256 differs for bytes" in problems
    assert f"{file.path}: {name}: SHA-256 of the first" in problems


def test_validate_does_not_start_what_this_machine_cannot(
    coded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert validate_main([str(coded)]) == 0
    out = capsys.readouterr().out
    assert "sound" in out
    assert "not started: its weights are coded for a GPU" in out


def test_validate_finds_a_table_that_cannot_be_true(tmp_path: Path, coded: Path) -> None:
    import hashlib

    damaged = Path(shutil.copytree(coded, tmp_path / "damaged"))
    path = damaged / "codec" / "pieces.bin"
    data = bytearray(path.read_bytes())
    count = len(data) // 12
    data[4 * (count + 1) : 4 * (count + 2)] = (0).to_bytes(4, "little")  # the second piece has no bytes
    path.write_bytes(data)
    manifest = json.loads((damaged / "manifest.json").read_bytes())
    next(f for f in manifest["files"] if f["path"] == "codec/pieces.bin")["sha256"] = hashlib.sha256(
        data
    ).hexdigest()
    (damaged / "manifest.json").write_text(json.dumps(manifest))
    assert any("piece 1 at" in problem for problem in validate_directory(damaged).problems)


@pytest.mark.parametrize("name", ["U", "A"])
def test_a_prepared_directory_unpacks_on_a_device(
    coded: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("COLDFRAME_ALLOW_STORAGE_FAULT", "1")
    plain, manifest = read_manifest(prepared), read_manifest(coded)
    order = manifest.order("t2va", "base-3")
    rung, host = Rung(name), Rung("E")
    with rung.start(plan_load(manifest, order, chunk_bytes=65536), coded) as stream:
        found = rung.contents(stream)
    with host.start(plan_load(plain, order, chunk_bytes=65536), prepared) as stream:
        assert found == host.contents(stream)
    gc.collect()
    rung.finish()


def test_without_a_gpu_the_codec_is_refused(
    tmp_path: Path,
    diffusers_checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = [str(diffusers_checkpoint), str(tmp_path / "model"), "--schedule", "base-3"]
    assert prepare_main([*arguments, "--codec", "ans"]) == CapabilityError.exit_code
    assert "--codec: weights are coded on a GPU, and there is none" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def test_a_worker_on_the_cpu_says_what_to_prepare(coded: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "runtime.cli", "probe", str(coded), "--device", "cpu", "--schedule", "base-3"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == CapabilityError.exit_code
    assert "codec: weights are coded for a GPU" in done.stderr
    assert "--codec none" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("storage", "link", "choice"),
    [(1e-9, 50.0, "ans"), (50.0, 1e-9, "ans"), (30.0, 50.0, "none")],
    ids=["slow_storage", "slow_link", "nothing_to_wait_for"],
)
def test_advice_follows_the_slower_of_storage_and_link(
    coded: Path, prepared: Path, storage: float, link: float, choice: str
) -> None:
    manifest = read_manifest(coded)
    before = read_manifest(prepared)
    order = next(iter(before.orders.values()))
    first_block = order.index("transformer/blocks.0")
    plain = sum(before.groups[name].end - before.groups[name].start for name in order[:first_block])
    advice = advise(manifest, Rates(storage, link))
    assert advice.choice == choice
    assert advice.plain_bytes == plain
    assert advice.stored_bytes < plain
    assert advice.plain_s == max(2.0, 0.5 + plain / 1e9 / min(storage, link))
    assert f"prepare --codec {choice}" in str(advice)


ENTRY_BYTES = (50_369_027_584, 33_587_219_200)  # plain and coded, of the released size


@pytest.mark.parametrize(
    ("storage", "plain_s", "coded_s", "tolerance"),
    [
        (1.0, 50.58, 33.82, 0.03),
        (2.0, 25.53, 17.04, 0.03),
        (5.5, 9.58, 6.47, 0.03),
        (11.0, 5.10, 3.60, 0.03),
        (22.0, 3.13, 2.37, 0.16),  # the reader's threads do not reach 22 GB/s while libraries are loaded
        (25.0, 2.54, 2.09, 0.05),  # hot: the rate of the ring alone, out of memory-backed storage
    ],
)
def test_advice_agrees_with_measured_entries(
    storage: float, plain_s: float, coded_s: float, tolerance: float
) -> None:
    """Against first entries on one H200, `scripts/bench/results/codec_start.json`: coded was sooner in all of them."""
    advice = Advice(Rates(storage, 50.0), *ENTRY_BYTES)
    assert advice.plain_s == pytest.approx(plain_s, rel=tolerance)
    assert advice.stored_s == pytest.approx(coded_s, rel=tolerance)
    assert advice.choice == "ans"
