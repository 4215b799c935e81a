"""Untrusted pictures → upright RGB, 8 bits per channel.

Accepted: PNG, JPEG, WebP and GIF, recognised by content, never by name or declared type. What a picture becomes:
- EXIF orientation is applied once, before anything is measured; a damaged or out-of-range tag means "as stored";
- alpha and transparent colours are dropped, not blended (a transparent pixel shows the colour stored under it);
- gray, palette, CMYK and one-bit pictures become RGB; 16-bit gray is scaled by 255/65535, never clamped;
- of an animation, or of a file with several pictures, the first counts; colour profiles are not applied.

Sizes are read from the header and refused before any pixel is decoded; after that the whole picture is decoded here,
so a truncated file cannot become half a gray frame later. The plugins are called directly: Pillow's `open` would try
its other formats and warn or raise errors of its own about large pictures. Pillow is imported on use.
"""

from __future__ import annotations

import contextlib
import io
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loader.errors import RequestError

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

FORMATS = ("PNG", "JPEG", "WebP", "GIF")
_DAMAGE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    struct.error,
    zlib.error,
    IndexError,
    KeyError,
    TypeError,
)
_ORIENTATION_TAG, _SHORT = 0x0112, 3
_START_OF_SCAN, _APP1, _COMMENT = 0xDA, 0xE1, 0xFE


@dataclass(frozen=True)
class ImageLimits:
    """What is accepted. 50 million pixels admit current phone cameras and need 150 MB decoded.

    Attributes:
        max_side: of width and height, in pixels; None: any.
        formats: a part of `FORMATS`.
        is_single: refuse animations, instead of taking their first picture.
    """

    max_bytes: int = 32 << 20
    max_pixels: int = 50_000_000
    max_side: int | None = None
    formats: tuple[str, ...] = FORMATS
    is_single: bool = False


@dataclass(frozen=True)
class ImageHeader:
    """What a file says of itself: one of `FORMATS`, and pixels as stored (EXIF not applied)."""

    kind: str
    width: int
    height: int


def decode_image(data: bytes, limits: ImageLimits | None = None, where: str = "image") -> Image:
    """One upright RGB picture.

    Args:
        data: the encoded file.
        where: request field for messages.

    Raises: RequestError: 413 too many bytes or pixels; 415 another format (names the one found) or an animation;
        422 empty, damaged or truncated.
    """
    limits = limits or ImageLimits()
    kind = _accepted_format(data, limits, where)
    with _damage_refused(kind, limits, where):
        picture, exif = _open(data, kind, limits, where)
        picture.load()
        orientation = exif_orientation(picture.info.get("exif", b"") if exif is None else exif)
        return _upright(_to_rgb(picture), orientation)


def read_header(data: bytes, limits: ImageLimits, where: str = "image") -> ImageHeader:
    """Format and size of a picture within the limits, without decoding it: what is damaged behind the header is found
    by `decode_image`. Arguments and errors as there."""
    kind = _accepted_format(data, limits, where)
    with _damage_refused(kind, limits, where):
        picture, _ = _open(data, kind, limits, where)
        return ImageHeader(kind, *picture.size)


def _accepted_format(data: bytes, limits: ImageLimits, where: str) -> str:
    if len(data) > limits.max_bytes:
        raise RequestError(
            "the image file is too large", where=where, found=f"{len(data)} bytes",
            expected=f"at most {limits.max_bytes} bytes", http_status=413,
        )  # fmt: skip
    kind = sniff_format(data)
    if kind not in limits.formats:
        message = "the image file is empty" if kind == "nothing" else "unsupported image format"
        status = 422 if kind == "nothing" else 415
        expected = _listed(limits.formats)
        raise RequestError(message, where=where, found=kind, expected=expected, http_status=status)
    return kind


@contextlib.contextmanager
def _damage_refused(kind: str, limits: ImageLimits, where: str) -> Iterator[None]:
    from PIL.Image import DecompressionBombError

    try:
        yield
    except DecompressionBombError as error:  # WebP and GIF look at the size themselves while opening
        raise _too_many_pixels("far more", limits, where) from error
    except _DAMAGE as error:
        raise RequestError(
            f"the {kind} image cannot be decoded: it is truncated or damaged",
            where=where,
            found=str(error)[:120] or type(error).__name__,
            expected=f"a complete {_listed(limits.formats)} file",
            http_status=422,
        ) from error


def _open(data: bytes, kind: str, limits: ImageLimits, where: str) -> tuple[ImageFile, bytes | None]:
    """The opened file, and a JPEG's EXIF block, which was taken out of it. Raises: RequestError: beyond the limits."""
    data, exif = _without_metadata(data) if kind == "JPEG" else (data, None)
    picture = _opener(kind)(io.BytesIO(data))
    width, height = picture.size
    if width * height > limits.max_pixels or max(width, height) > (limits.max_side or max(width, height)):
        raise _too_many_pixels(f"{width}x{height}", limits, where)
    if limits.is_single and getattr(picture, "n_frames", 1) > 1:
        raise RequestError(
            "the image is animated", where=where, found="several pictures", expected="one", http_status=415
        )
    return picture, exif


def sniff_format(data: bytes) -> str:
    """Name of the format by its first bytes: "PNG", "JPEG", "WebP", "GIF", or what else it looks like."""
    head = data[:512]
    signatures = (
        (b"\x89PNG\r\n\x1a\n", "PNG"), (b"\xff\xd8\xff", "JPEG"), (b"GIF87a", "GIF"), (b"GIF89a", "GIF"),
        (b"BM", "BMP"), (b"II*\0", "TIFF"), (b"MM\0*", "TIFF"), (b"II+\0", "TIFF"), (b"MM\0+", "TIFF"),
        (b"\0\0\0\x0cjP  \r\n", "JPEG 2000"), (b"\xff\x4f\xff\x51", "JPEG 2000"), (b"8BPS", "PSD"), (b"%PDF", "PDF"),
    )  # fmt: skip
    if not data:
        return "nothing"
    for signature, name in signatures:
        if head.startswith(signature):
            return name
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WebP"
    if head[4:8] == b"ftyp":
        brands = head[8:12] + head[16:64]
        return "AVIF" if b"avi" in brands else "HEIC" if re.search(rb"hei|hev|mif1|msf1", brands) else "MP4"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if re.match(rb"<(svg|\?xml)", text):
        return "SVG" if b"<svg" in data[:4096].lower() else "XML"
    if re.match(rb"<(!doctype html|html|head|body)", text):
        return "HTML (an expired link often returns a page)"
    return "an unknown format"


def exif_orientation(exif: bytes) -> int:
    """Orientation 1 … 8 of an EXIF block (with or without its `Exif` prefix); 1 if absent, damaged or out of range."""
    block = exif.removeprefix(b"Exif\0\0")
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(block[:4])
    if order is None:
        return 1
    try:
        (start,) = struct.unpack_from(order + "I", block, 4)
        (entries,) = struct.unpack_from(order + "H", block, start)
        for index in range(entries):
            tag, kind, _, value = struct.unpack_from(order + "HHIH", block, start + 2 + 12 * index)
            if tag == _ORIENTATION_TAG:
                return value if kind == _SHORT and 1 <= value <= 8 else 1
    except struct.error:
        pass  # a directory that leaves the block: as stored
    return 1


def _without_metadata(jpeg: bytes) -> tuple[bytes, bytes]:
    """A JPEG file without its comments and APP1 segments, and its first EXIF block (empty if there is none).

    Pillow would parse both while opening: a damaged EXIF block makes it warn, comments cost memory. The walk ends at
    the first scan or at anything that is not a segment; what follows stays as it is for the decoder to judge.
    """
    kept, exif, at = [jpeg[:2]], b"", 2
    while jpeg[at : at + 1] == b"\xff" and at + 4 <= len(jpeg):
        marker, size = jpeg[at + 1], int.from_bytes(jpeg[at + 2 : at + 4], "big")
        if marker == _START_OF_SCAN or size < 2:
            break
        segment = jpeg[at : at + 2 + size]
        if marker == _APP1:
            exif = exif or (segment[4:] if segment[4:10] == b"Exif\0\0" else b"")
        elif marker != _COMMENT:
            kept.append(segment)
        at += 2 + size
    return b"".join(kept) + jpeg[at:], exif


def _opener(kind: str) -> Callable[[io.BytesIO], ImageFile]:
    """The plugin class of an accepted format. It reads the header only; pixels are decoded by `load`."""
    if kind == "PNG":
        from PIL.PngImagePlugin import PngImageFile

        return PngImageFile
    if kind == "JPEG":
        from PIL.JpegImagePlugin import JpegImageFile

        return JpegImageFile
    if kind == "WebP":
        from PIL.WebPImagePlugin import WebPImageFile

        return WebPImageFile
    from PIL.GifImagePlugin import GifImageFile

    return GifImageFile


def _too_many_pixels(found: str, limits: ImageLimits, where: str) -> RequestError:
    return RequestError(
        "the image is too large",
        where=where,
        found=f"{found} pixels",
        expected=f"at most {limits.max_pixels} pixels"
        + (f", sides up to {limits.max_side}" if limits.max_side else ""),
        http_status=413,
    )


def _listed(formats: tuple[str, ...]) -> str:
    return f"{', '.join(formats[:-1])} or {formats[-1]}"


def _to_rgb(picture: Image) -> Image:
    """RGB without alpha; 16-bit gray scaled."""
    from PIL import Image as pillow

    if picture.mode.startswith("I"):
        import numpy as np

        wide = np.asarray(picture).astype(np.uint32)
        return pillow.fromarray(((wide * 255 + 32767) // 65535).astype(np.uint8)).convert("RGB")
    if picture.mode == "P" and "transparency" in picture.info:
        picture = picture.convert("RGBA")
    rgb = picture.convert("RGB")
    rgb.info = {}
    return rgb


def _upright(picture: Image, orientation: int) -> Image:
    from PIL.Image import Transpose

    method = {
        2: Transpose.FLIP_LEFT_RIGHT, 3: Transpose.ROTATE_180, 4: Transpose.FLIP_TOP_BOTTOM, 5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270, 7: Transpose.TRANSVERSE, 8: Transpose.ROTATE_90,
    }.get(orientation)  # fmt: skip
    return picture if method is None else picture.transpose(method)
