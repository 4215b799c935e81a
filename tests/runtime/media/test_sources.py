"""Data URIs and URLs: what is accepted, what is refused, and that a payload is never repeated."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.errors import RequestError
from runtime.media.sources import read_image_source

LIMIT = 1000


def refuse_fetch(url: str) -> bytes:
    raise AssertionError(f"fetched {url}")


@given(
    st.binary(min_size=1, max_size=100),
    st.sampled_from(["data:image/png;base64,", "DATA:Image/JPEG;BASE64,"]),
)
def test_data_uris_give_their_bytes(data: bytes, header: str) -> None:
    assert read_image_source(header + base64.b64encode(data).decode(), "first_frame", LIMIT) == data


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_raw_bytes_pass(kind: type) -> None:
    assert read_image_source(kind(b"abc"), "first_frame", LIMIT) == b"abc"


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("data:image/png;base64SECRET", "no base64 image part"),
        ("data:image/png;base64,SECRET@@", "not valid base64"),
        ("data:image/png;base64,SECRETé", "not valid base64"),
        ("data:image/png;base64,", "empty"),
        ("data:image/png,SECRET", "must be base64"),
        ("data:text/html;base64,SECRET", "text/html"),
        ("data:image/svg+xml;base64,SECRET", "svg"),
        ("data:image/png;x=1;base64,SECRET", "must be base64"),
        ("data:image/png;" + "x=1;" * 5000 + "base64,SECRET", "no base64 image part"),
        ("data:image/png;base64,SECRET" + "A" * 2000, "too large"),
        ("SECRET" * 10, "neither a data URI nor a URL"),
        ("/etc/SECRET", "path of this machine"),
    ],
)
def test_bad_sources_are_refused_without_their_payload(uri: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        read_image_source(uri, "last_frame", LIMIT)
    assert str(caught.value).startswith("last_frame: ")
    assert "SECRET" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    "value", [None, 7, True, ["data:image/png;base64,AAAA"], {"url": "https://a.b/c.png"}]
)
def test_other_types_are_refused(value: object) -> None:
    with pytest.raises(RequestError, match="not an image"):
        read_image_source(value, "first_frame", LIMIT)


def test_urls_need_a_fetcher() -> None:
    with pytest.raises(RequestError, match="not allowed here"):
        read_image_source("https://example.com/a.png", "first_frame", LIMIT)
    got = read_image_source("https://example.com/a.png", "first_frame", LIMIT, lambda url: url.encode())
    assert got == b"https://example.com/a.png"


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/a.png", "file:///etc/passwd", "gopher://127.0.0.1:6379/_x", "ftp://a/b", "https:///x.png",
        "https://user@127.0.0.1/x.png", "https://:pw@h/x", "https://example.com/\r\nHost: x", "https://a b/c",
        "https://[::1/x", "https://host:99999/x", "https://ex\u0430mple.com/x", "https://a\\@b/x", "javascript:alert(1)",
    ],
)  # fmt: skip
def test_malformed_urls_and_other_schemes_never_reach_the_fetcher(url: str) -> None:
    with pytest.raises(RequestError, match="URL"):
        read_image_source(url, "first_frame", LIMIT, refuse_fetch)


def test_fetched_bytes_are_bounded() -> None:
    with pytest.raises(RequestError, match="1001 bytes") as caught:
        read_image_source("https://example.com/a.png", "first_frame", LIMIT, lambda _: b"x" * 1001)
    assert caught.value.http_status == 413
