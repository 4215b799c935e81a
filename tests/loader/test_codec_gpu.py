"""Real nvCOMP on a real device: `pytest -m gpu tests/loader/test_codec_gpu.py` (needs the extra `codec`)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from loader.errors import ArtifactError, WorkerError
from loader.load_plan import plan_load
from loader.manifest import CHUNK_BYTES, read_manifest
from loader.options import StreamOptions
from loader.stream import start
from prepare.codec import CodecLimits, Coding
from prepare.codec_directory import encode_directory
from prepare.codec_gpu import GpuEncoder
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
    return GpuEncoder()


def _normal(dtype: str, count: int, seed: int) -> bytearray:
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 0.02
    return bytearray(raw_bytes(values.to(TORCH[dtype]).contiguous()))


@pytest.mark.parametrize("piece_bytes", [4096, 65536, 262144])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F8_E4M3", "U8"])
@pytest.mark.parametrize("count", [1, 255, 262144, 700_001])
def test_pieces_prove_themselves_and_bytes_repeat(
    encoder: GpuEncoder, dtype: str, count: int, piece_bytes: int
) -> None:
    """`encode` decodes and compares on the device, and checks its CRC-32 against zlib's; here: the same bytes twice."""
    data = _normal("BF16" if dtype == "U8" else dtype, count, seed=count)
    pieces, sums = encoder.encode(data, dtype, piece_bytes)
    assert len(pieces) == len(sums) == -(-len(data) // piece_bytes)
    assert encoder.encode(data, dtype, piece_bytes) == (pieces, sums)


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
