"""Every picture case: accepted ones show the right colours upright, the others are refused with the format found."""

from __future__ import annotations

import contextlib
import io
import json
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from loader.errors import RequestError
from runtime.media.images import (
    ImageHeader,
    ImageLimits,
    decode_image,
    exif_orientation,
    read_header,
    sniff_format,
)

INPUTS = Path(__file__).parents[2] / "cases" / "inputs"
CASES = [entry for entry in json.loads((INPUTS / "index.json").read_text()) if entry["group"] == "images"]
REFUSED_BY_POLICY = {"I44", "I55", "I56", "I57"}  # text bomb; TIFF, BMP and AVIF are not on the list


def data_of(case: dict[str, Any]) -> bytes:
    return (INPUTS / case["file"]).read_bytes()


def patch(image: Image.Image, x: float, y: float) -> np.ndarray:
    cx, cy = round(x * image.width), round(y * image.height)
    return np.asarray(image.crop((cx - 4, cy - 4, cx + 4, cy + 4)), dtype=float).mean(axis=(0, 1))


@pytest.mark.parametrize("case", CASES, ids=[c["id"] for c in CASES])
def test_case(case: dict[str, Any]) -> None:
    expect = case["expect"]
    if expect["outcome"] == "reject" or case["id"] in REFUSED_BY_POLICY:
        with pytest.raises(RequestError) as caught:
            decode_image(data_of(case), where="first_frame")
        assert caught.value.where == "first_frame"
        assert caught.value.http_status in (413, 415, 422)
        assert any(word in str(caught.value).lower() for word in expect.get("say", ["image"]))
        return
    image = decode_image(data_of(case))
    assert image.mode == "RGB"
    assert list(image.size) == expect["size"]
    pixels = np.asarray(image)
    assert pixels.std() > 1, "blank picture"
    for spot in expect.get("spots", expect.get("drop_spots", [])):
        assert np.abs(patch(image, *spot["xy"]) - spot["rgb"]).max() <= expect.get("tol", 2), spot
    if expect.get("gray"):
        assert np.array_equal(pixels[..., 0], pixels[..., 1])
        assert np.array_equal(pixels[..., 0], pixels[..., 2])
    if "mean" in expect:
        assert expect["mean"][0] <= pixels.mean() <= expect["mean"][1]
        assert (pixels == 255).mean() <= expect["white_fraction_max"]


def test_every_case_is_decided() -> None:
    assert len(CASES) >= 50
    assert {c["id"] for c in CASES if c["expect"]["outcome"] == "either"} >= REFUSED_BY_POLICY


@pytest.mark.parametrize("case_id", ["I42", "I44", "I45", "I59"])
def test_memory_stays_small(case_id: str) -> None:
    case = next(c for c in CASES if c["id"] == case_id)
    data = data_of(case)
    tracemalloc.start()
    with contextlib.suppress(RequestError):
        decode_image(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20


def test_dropped_alpha_shows_the_stored_colour() -> None:
    case = next(c for c in CASES if c["id"] == "I26")
    reference = np.asarray(Image.open(INPUTS / case["file"]))[..., :3]
    assert np.array_equal(np.asarray(decode_image(data_of(case))), reference)


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("order", ["II", "MM"])
def test_orientation_equals_pillow(orientation: int, order: str) -> None:
    source = Image.fromarray(np.random.default_rng(orientation).integers(0, 256, (6, 9, 3), dtype=np.uint8))
    mark = "<" if order == "II" else ">"
    exif = (
        order.encode()
        + struct.pack(mark + "HIH", 42, 8, 1)
        + struct.pack(mark + "HHIHHI", 0x0112, 3, 1, orientation, 0, 0)
    )
    buffer = io.BytesIO()
    source.save(buffer, "PNG", exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(buffer.getvalue())))
    assert np.array_equal(np.asarray(decode_image(buffer.getvalue())), np.asarray(expected))


@settings(deadline=None)
@given(st.binary(max_size=80), st.sampled_from([b"", b"II*\0", b"MM\0*", b"Exif\0\0II*\0\x08\0\0\0"]))
def test_any_exif_block_gives_an_orientation(tail: bytes, head: bytes) -> None:
    assert 1 <= exif_orientation(head + tail) <= 8


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_damaged_files_are_decoded_or_refused(data: st.DataObject) -> None:
    name = data.draw(
        st.sampled_from(["good.png", "good.jpg", "good.webp", "animated.gif", "palette.png", "cmyk.jpg"])
    )
    content = bytearray((INPUTS / "images" / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)))
    with contextlib.suppress(RequestError):  # any other error fails the test
        assert decode_image(bytes(content[:cut])).mode == "RGB"


def png_header(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + header
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk)) + struct.pack(">I", 10) + b"IDAT" + b"x" * 14  # fmt: skip


def test_limits_are_checked_before_decoding() -> None:
    with pytest.raises(RequestError, match=r"too large; found 12000x12000 pixels; .*50000000"):
        decode_image(png_header(12_000, 12_000))
    with pytest.raises(RequestError, match="100 bytes") as caught:
        decode_image(b"x" * 101, ImageLimits(max_bytes=100))
    assert caught.value.http_status == 413
    good = (INPUTS / "images" / "good.png").read_bytes()
    with pytest.raises(RequestError, match="320x192"):
        decode_image(good, ImageLimits(max_pixels=320 * 192 - 1))
    assert decode_image(good, ImageLimits(max_pixels=320 * 192)).size == (320, 192)


def test_frames_larger_than_the_canvas_of_a_gif_are_refused() -> None:
    data = bytearray((INPUTS / "images" / "animated.gif").read_bytes())
    at = data.index(b"\x2c", 13 + 3 * 2 ** ((data[10] & 7) + 1))  # image descriptor of the first frame
    data[at + 5 : at + 9] = b"\xff\xff\xff\xff"
    with pytest.raises(RequestError, match="too large") as caught:
        decode_image(bytes(data))
    assert caught.value.http_status == 413


@pytest.mark.parametrize(
    ("data", "name"),
    [(b"", "nothing"), (b"hello", "unknown"), (b"%PDF-1.7", "PDF"), (b"<?xml version='1.0'?><svg/>", "SVG"),
     (b"\0\0\0\x1cftypisom\0\0\0\0isomiso2", "MP4"), (b"\0\0\0\x1cftypmif1\0\0\0\0mif1heic", "HEIC")],
)  # fmt: skip
def test_formats_are_named_by_content(data: bytes, name: str) -> None:
    assert name in sniff_format(data)


def encoded(kind: str, size: tuple[int, int] = (40, 30), pictures: int = 1) -> bytes:
    """A file with this many different pictures."""
    stream = io.BytesIO()
    first, *others = (Image.new("RGB", size, (50 * index, 9, 9)) for index in range(pictures))
    animation = {"save_all": True, "append_images": others} if others else {}
    first.save(stream, kind, **animation)
    return stream.getvalue()


@pytest.mark.parametrize(("kind", "share"), [("PNG", 0.75), ("JPEG", 0.75), ("WebP", 1), ("GIF", 0.75)])
def test_a_header_is_read_without_its_pixels(kind: str, share: float) -> None:
    """WebP's library opens whole files only."""
    data = encoded(kind, (400, 300))
    assert read_header(data[: round(len(data) * share)], ImageLimits()) == ImageHeader(kind, 400, 300)


@pytest.mark.parametrize(
    ("limits", "data", "status", "message"),
    [
        pytest.param({"max_side": 39}, encoded("PNG"), 413, "40x30 pixels.*sides up to 39", id="side"),
        pytest.param({"max_pixels": 1199}, encoded("PNG"), 413, "40x30 pixels.*1199", id="pixels"),
        pytest.param({"max_bytes": 9}, encoded("PNG"), 413, "file is too large", id="bytes"),
        pytest.param({"formats": ("PNG", "JPEG")}, encoded("GIF"), 415, "found GIF; allowed: PNG or JPEG", id="format"),
        pytest.param({"is_single": True}, encoded("PNG", pictures=2), 415, "animated", id="animated PNG"),
        pytest.param({"is_single": True}, encoded("WebP", pictures=2), 415, "animated", id="animated WebP"),
        pytest.param({}, b"", 422, "empty", id="empty"),
        pytest.param({}, encoded("PNG")[:20], 422, "damaged", id="cut header"),
    ],
)  # fmt: skip
def test_headers_beyond_the_limits_are_refused_alike_by_both_readers(
    limits: dict[str, Any], data: bytes, status: int, message: str
) -> None:
    for read in (read_header, decode_image):
        with pytest.raises(RequestError, match=message) as caught:
            read(data, ImageLimits(**limits), "first_frame")
        assert (caught.value.http_status, caught.value.where) == (status, "first_frame")


def test_limits_are_met_exactly() -> None:
    limits = ImageLimits(max_bytes=len(encoded("PNG")), max_pixels=1200, max_side=40, is_single=True)
    assert read_header(encoded("PNG"), limits) == ImageHeader("PNG", 40, 30)
    assert decode_image(encoded("PNG"), limits).size == (40, 30)
