"""Real nvCOMP on a real device: `pytest -m gpu tests/loader/test_codec_gpu.py` (needs the extra `codec`)."""

from __future__ import annotations

import importlib.util
import shutil
import zlib
from pathlib import Path

import pytest
import torch

from loader.codec.nvcomp import Nvcomp
from loader.errors import ArtifactError, InternalError, WorkerError
from loader.load_plan import plan_load
from loader.manifest import CHUNK_BYTES, read_manifest
from loader.options import StreamOptions
from loader.stream import start
from prepare.codec import CodecLimits, Coding
from prepare.codec_directory import encode_directory
from prepare.codec_gpu import GpuEncoder, PieceBatch
from tests.loader.coded import flip
from tests.loader.prepared import Prepared, write_prepared
from tests.loader.rungs import raw_bytes

pytestmark = pytest.mark.gpu
LAYOUT = {
    "dit": [
        {
            "dit/a": {"a.w": ("BF16", (1536, 1031)), "a.s": ("F32", (9,)), "a.v": ("F16", (700, 1001))},
            "dit/b": {
                "b.small": ("BF16", (10, 10)),
                "b.f": ("F32", (640, 1000)),
                "b.8": ("F8_E4M3", (1024, 1500)),
            },
        }
    ]
}
TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}


@pytest.fixture(scope="module")
def encoder() -> GpuEncoder:
    if importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.libnvcomp") is None:
        pytest.skip("nvCOMP is not installed: pip install 'coldframe[codec]'")
    return GpuEncoder()


def _normal(dtype: str, count: int, seed: int) -> bytearray:
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 0.02
    return bytearray(raw_bytes(values.to(TORCH[dtype]).contiguous()))


def _decode_sums(data: bytearray, dtype: str, piece_bytes: int, pieces: list[bytes]) -> list[int]:
    """CRC-32 of what stored pieces decode to. Raises: InternalError: not the bytes of `data`."""
    plain = torch.frombuffer(data, dtype=torch.uint8).cuda()
    stream = torch.cuda.current_stream().cuda_stream
    batch = PieceBatch(Nvcomp(), plain, dtype, piece_bytes, stream)
    stored = bytearray(b"".join(piece.ljust(batch.room, b"\xee") for piece in pieces))
    sizes = torch.tensor([len(piece) for piece in pieces], dtype=torch.int64).cuda()
    return batch.prove(torch.frombuffer(stored, dtype=torch.uint8).cuda(), sizes)


@pytest.mark.parametrize("piece_bytes", [4096, 65536, 262144])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F8_E4M3", "U8"])
@pytest.mark.parametrize("count", [1, 255, 262144, 700_001])
def test_every_coding_decodes_to_the_values_and_sums_repeat(
    encoder: GpuEncoder, dtype: str, count: int, piece_bytes: int
) -> None:
    """Coded twice, the bytes may differ; pieces of either coding decode to the values, also mixed in one call."""
    data = _normal("BF16" if dtype == "U8" else dtype, count, seed=count)
    starts = range(0, len(data), piece_bytes)
    wanted = [zlib.crc32(data[start : start + piece_bytes]) for start in starts]
    pieces, sums = encoder.encode(data, dtype, piece_bytes)
    others, other_sums = encoder.encode(data, dtype, piece_bytes)
    assert sums == other_sums == wanted
    mixed = [pair[number % 2] for number, pair in enumerate(zip(pieces, others, strict=True))]
    for stored in (pieces, others, mixed):
        assert _decode_sums(data, dtype, piece_bytes, stored) == wanted
    # What decides whether a tensor is coded is its size: a coding must not be far from the next one.
    assert sum(map(len, others)) == pytest.approx(sum(map(len, pieces)), rel=0.01)


def test_a_piece_of_other_values_is_not_proved(encoder: GpuEncoder) -> None:
    data = _normal("BF16", 300_000, seed=2)
    pieces, _ = encoder.encode(data, "BF16", 65536)
    pieces[0], pieces[1] = pieces[1], pieces[0]
    with pytest.raises(InternalError, match="does not decode to itself"):
        _decode_sums(data, "BF16", 65536, pieces)


@pytest.mark.parametrize("kind", ["zeros", "noise", "nan", "subnormal"])
def test_odd_contents_are_kept_bit_for_bit(encoder: GpuEncoder, kind: str) -> None:
    words = {
        "zeros": torch.zeros(300_000, dtype=torch.int16),
        "noise": torch.randint(-32768, 32767, (300_000,), dtype=torch.int16),
        "nan": torch.full((300_000,), 0x7FC1, dtype=torch.int16),
        "subnormal": torch.randint(1, 127, (300_000,), dtype=torch.int16),
    }[kind]
    encoder.encode(bytearray(raw_bytes(words)), "BF16", 262144)  # raises unless it decodes to itself


def test_bf16_weights_take_two_thirds(encoder: GpuEncoder) -> None:
    data = _normal("BF16", 16 << 20, seed=1)
    pieces, _ = encoder.encode(data, "BF16", 262144)
    assert sum(map(len, pieces)) / len(data) == pytest.approx(
        0.666, abs=0.01
    )  # 0.666 measured with normal values


@pytest.fixture(scope="module")
def directories(
    tmp_path_factory: pytest.TempPathFactory, encoder: GpuEncoder
) -> tuple[Path, dict[str, bytes]]:
    """A coded directory of normal values, and the original bytes."""
    folder = tmp_path_factory.mktemp("coded")
    raw = write_prepared(folder / "raw", LAYOUT, {}, chunk_bytes=CHUNK_BYTES, normal=True)
    encode_directory(folder / "raw", folder / "coded", Coding(encoder, CodecLimits(min_bytes=4096)))
    return folder / "coded", raw.content


@pytest.mark.parametrize("path", ["U", "A", "B", "C", "D"])
@pytest.mark.parametrize("slots", [1, 4, None])
def test_every_rung_unpacks_to_the_original_bytes(
    directories: tuple[Path, dict[str, bytes]], path: str, slots: int | None
) -> None:
    directory, content = directories
    manifest = read_manifest(directory)
    plan = plan_load(manifest, ["dit/a", "dit/b"], chunk_bytes=1 << 20)
    assert "dit/a.w" in plan.coded
    options = StreamOptions(path=path, ring_bytes=8 << 20, staging_slots=slots)
    with start(plan, directory, device="cuda", options=options) as stream:
        state = {name: raw_bytes(tensor.cpu()) for name, tensor in stream.state_dict().items()}
        assert stream.path == path
    assert state == {name: content[name] for name in state}


@pytest.mark.parametrize("path", ["U", "A"])
@pytest.mark.parametrize("at", [4, 100, -1000])
def test_a_flipped_bit_is_named(
    directories: tuple[Path, dict[str, bytes]], tmp_path: Path, path: str, at: int
) -> None:
    """Wherever it is in the piece: header, code table, payload. Its edges are not where the reader looks."""
    damaged = Path(shutil.copytree(directories[0], tmp_path / "damaged"))
    manifest = read_manifest(damaged)
    flip(Prepared(damaged, {}, {}), manifest, "dit/a.w", 5, at)
    plan = plan_load(manifest, ["dit/a", "dit/b"], chunk_bytes=1 << 20)
    options = StreamOptions(path=path, ring_bytes=8 << 20)
    with (
        start(plan, damaged, device="cuda", options=options) as stream,
        pytest.raises(WorkerError, match=r"dit/a.w: piece 5 at byte") as caught,
    ):
        stream.wait_all()
    assert isinstance(caught.value, ArtifactError)
