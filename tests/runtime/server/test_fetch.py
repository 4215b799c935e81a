"""The guarded fetch: which addresses it refuses, and what it does with servers that misbehave."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from runtime.server.errors import ApiError
from runtime.server.fetch import Fetcher, is_global_address, parse_url

PNG = b"\x89PNG\r\n\x1a\n" + b"x" * 100

REFUSED = [
    "127.0.0.1", "127.8.9.1", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "192.0.0.1", "192.0.2.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1", "240.0.0.1", "255.255.255.255",
    "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12:3456::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8",
    "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::1", "2002:7f00:1::", "2001:0:7f00:1::", "2001:db8::1", "not an address",
]  # fmt: skip


@pytest.mark.parametrize("address", REFUSED)
def test_addresses_that_are_not_on_the_public_internet(address: str) -> None:
    assert not is_global_address(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111"])
def test_public_addresses(address: str) -> None:
    assert is_global_address(address)


@pytest.mark.parametrize("address", REFUSED[:-1])
def test_a_name_that_resolves_there_is_refused_without_a_connection(address: str) -> None:
    fetcher = Fetcher(True, 1000, resolve=lambda host, port: ["8.8.8.8", address])
    with pytest.raises(ApiError) as refusal:
        fetcher.fetch("http://pictures.example/a.png", "first_frame")
    assert (refusal.value.code, refusal.value.where) == ("url_not_allowed", "first_frame")


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "[::1]", "2130706433", "0x7f.1", "127.1", "[::ffff:127.0.0.1]", "0"]
)
def test_loopback_in_every_spelling_with_the_real_resolver(host: str) -> None:
    with pytest.raises(ApiError) as refusal:
        Fetcher(True, 1000, retries=0).fetch(f"http://{host}:9/a.png", "first_frame")
    assert refusal.value.code in ("url_not_allowed", "fetch_failed")
    assert refusal.value.http_status in (400, 422)


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd", "gopher://example.com/", "ftp://example.com/a", "http://", "http:///a", "http://user@example.com/",
        "http://a:b@example.com/", "http://example.com:0/", "http://example.com:99999/", "http://exa mple.com/",
        "http://example.com/\r\nHost: x", "http://example.com/\x00", "http://[::1/", "http://" + "a" * 3000, "http://x.com/ü",
    ],
)  # fmt: skip
def test_addresses_that_are_not_well_formed(url: str) -> None:
    with pytest.raises(ApiError) as refusal:
        parse_url(url, "first_frame")
    assert (refusal.value.http_status, refusal.value.code) == (400, "url_not_allowed")


def test_off_by_default() -> None:
    with pytest.raises(ApiError, match="not allowed as an input") as refusal:
        Fetcher(False, 1000).fetch("http://example.com/a.png", "first_frame")
    assert refusal.value.code == "url_inputs_disabled"


# ---- against a server of our own


@dataclass
class Site:
    """Answers by path, counts requests, keeps their headers."""

    port: int = 0
    seen: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    release: threading.Event = field(default_factory=threading.Event)

    def paths(self) -> list[str]:
        return [path for path, _ in self.seen]


@pytest.fixture
def site() -> Iterator[Site]:
    state = Site()

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def answer(self, status: int, body: bytes = b"", kind: str = "image/png", **headers: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", headers.pop("length", str(len(body))))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            state.seen.append((self.path, dict(self.headers)))
            attempts = state.paths().count(self.path)
            match self.path:
                case "/a.png":
                    self.answer(200, PNG)
                case "/flaky.png":
                    self.answer(*((404, b"") if attempts < 3 else (200, PNG)))
                case "/html":
                    self.answer(200, b"<html>", "text/html; charset=utf-8")
                case "/gone":
                    self.answer(410)
                case "/big":
                    self.answer(200, b"x" * 5000)
                case "/gzip":
                    self.answer(200, PNG, Content_Encoding="gzip")
                case "/loop":
                    self.answer(302, Location="/loop")
                case "/hop":
                    self.answer(302, Location="/a.png")
                case "/inside":
                    self.answer(302, Location=f"http://inside.example:{state.port}/a.png")
                case "/metadata":
                    self.answer(302, Location="http://169.254.169.254/latest/meta-data/")
                case "/file":
                    self.answer(302, Location="file:///etc/passwd")
                case "/slow":
                    self.send_response(200)
                    self.send_header("Content-Type", "image/png")
                    self.end_headers()
                    self.wfile.write(b"x")
                    self.wfile.flush()
                    state.release.wait(20)
                case _:
                    self.answer(404)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield state
    state.release.set()
    server.shutdown()
    thread.join()
    server.server_close()


def fetcher(**changes: object) -> Fetcher:
    """Public names lead to the site; `inside.example` is a private address for the policy."""
    answers = {"site.example": ["127.0.0.1"], "inside.example": ["10.1.2.3"]}
    settings: dict[str, object] = {"retry_pause_s": 0.001, "timeout_s": 5.0, **changes}
    return Fetcher(
        True, 1000, resolve=lambda host, port: answers.get(host, [host]),
        is_allowed=lambda address: address == "127.0.0.1" or is_global_address(address), **settings,  # type: ignore[arg-type]
    )  # fmt: skip


def test_the_name_stays_in_the_host_header_and_nothing_of_ours_is_sent(site: Site) -> None:
    data = fetcher().fetch(f"http://site.example:{site.port}/a.png", "first_frame")
    assert data == PNG
    _, headers = site.seen[0]
    assert headers["Host"] == f"site.example:{site.port}"
    assert not {"Authorization", "Cookie"} & set(headers)


def test_a_redirect_on_the_same_site_is_followed(site: Site) -> None:
    assert fetcher().fetch(f"http://site.example:{site.port}/hop", "f") == PNG
    assert site.paths() == ["/hop", "/a.png"]


@pytest.mark.parametrize("path", ["/inside", "/metadata", "/file"])
def test_a_redirect_into_the_private_network_is_not_followed(site: Site, path: str) -> None:
    with pytest.raises(ApiError) as refusal:
        fetcher().fetch(f"http://site.example:{site.port}{path}", "f")
    assert refusal.value.code == "url_not_allowed"
    assert site.paths() == [path]


def test_a_name_is_asked_once_per_hop_so_that_a_second_answer_cannot_matter(site: Site) -> None:
    answers = iter([["127.0.0.1"], ["10.0.0.1"]])
    asked: list[str] = []

    def resolve(host: str, port: int) -> list[str]:
        asked.append(host)
        return next(answers)

    pinned = Fetcher(True, 1000, resolve=resolve, is_allowed=lambda address: address == "127.0.0.1")
    assert pinned.fetch(f"http://site.example:{site.port}/a.png", "f") == PNG
    assert asked == ["site.example"]


def test_a_cold_cdn_is_asked_again(site: Site) -> None:
    assert fetcher().fetch(f"http://site.example:{site.port}/flaky.png", "f") == PNG
    assert len(site.seen) == 3


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/html", 422, ["site.example", "200", "text/html"]),
        ("/gone", 422, ["site.example", "410"]),
        ("/missing", 422, ["site.example", "404"]),
        ("/big", 413, ["too large", "1000"]),
        ("/gzip", 422, ["compressed"]),
        ("/loop", 422, ["redirects"]),
    ],
)
def test_failures_name_host_status_and_type(site: Site, path: str, status: int, words: list[str]) -> None:
    with pytest.raises(ApiError) as refusal:
        fetcher().fetch(f"http://site.example:{site.port}{path}", "first_frame")
    assert refusal.value.http_status == status
    assert refusal.value.where == "first_frame"
    assert all(word in str(refusal.value) for word in words)


def test_a_slow_server_meets_the_deadline(site: Site) -> None:
    with pytest.raises(ApiError) as refusal:
        fetcher(timeout_s=0.3, retries=0).fetch(f"http://site.example:{site.port}/slow", "f")
    assert refusal.value.code == "fetch_failed"


def test_nobody_listens() -> None:
    with pytest.raises(ApiError, match="cannot be fetched"):
        fetcher(retries=0).fetch("http://site.example:1/a.png", "f")
