"""Keys, ids, headers, and what must never be in a log or an answer."""

from __future__ import annotations

import contextlib
import http.server
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from runtime.server.admission import authenticate
from tests.fakes.service import KEY, OTHER_KEY, ROOT, ServiceProcess, raw_exchange

PROTECTED = [
    "/v1/videos",
    "/v1/models",
    "/v1/startup",
    "/v1/status",
    "/server_info",
    "/metrics",
    f"/v1/videos/video_{'0' * 32}",
]
OPEN = ["/", "/health", "/livez", "/liveness", "/ping", "/ready", "/readyz", "/version", "/openapi.json"]


@pytest.mark.parametrize("path", PROTECTED)
@pytest.mark.parametrize(
    "header", [None, "Bearer wrong", f"Basic {KEY}", KEY, "Bearer", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}"]
)
def test_no_key_no_answer(service: ServiceProcess, path: str, header: str | None) -> None:
    response = httpx.get(service.url + path, headers={"Authorization": header} if header else {})
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("path", OPEN)
def test_open_routes_need_none(service: ServiceProcess, path: str) -> None:
    assert httpx.get(service.url + path).status_code == 200


def test_every_key_is_compared_with_every_hash() -> None:
    compared: list[str] = []

    class Recorded(str):
        def __eq__(self, other: object) -> bool:
            compared.append(str(self))
            return str(self) == other

        __hash__ = str.__hash__

    hashes = ["0" * 64, "1" * 64]
    assert authenticate("Bearer x", hashes) is None
    assert compared == []  # no == on secrets: hmac.compare_digest looks at all bytes


def test_keys_do_not_see_each_others_jobs(service: ServiceProcess) -> None:
    video = service.create("private")["id"]
    with httpx.Client(base_url=service.url, headers={"Authorization": f"Bearer {OTHER_KEY}"}) as other:
        for method, path in [
            ("GET", ""),
            ("DELETE", ""),
            ("POST", "/cancel"),
            ("GET", "/events"),
            ("GET", "/content"),
        ]:
            assert other.request(method, f"/v1/videos/{video}{path}").status_code == 404
        assert video not in other.get("/v1/videos").text
        assert other.get("/v1/videos", params={"after": video}).status_code == 404
    assert service.get(video)["id"] == video


@pytest.mark.parametrize(
    "path",
    [
        "/v1/videos/../../etc/passwd", "/v1/videos/..%2f..%2fetc%2fpasswd", "/v1/videos/%2e%2e/secret", "/v1/videos/video_%00",
        "/v1/videos/..%2fvideos%2fx/content", "/v1/videos/video_..%2f..%2f..%2f/content", "/v1/videos/%2fetc%2fpasswd/content",
        "/v1/videos/" + "A" * 5000, "/v1/videos/video_" + "0" * 31 + "%0a",
    ],
)  # fmt: skip
def test_ids_never_become_paths(service: ServiceProcess, path: str) -> None:
    request = f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n\r\n"
    answer = raw_exchange(service.port, request.encode())
    assert answer.startswith(b"HTTP/1.1 404")
    assert b"root:" not in answer
    assert b'"type":"invalid_request_error"' in answer


@pytest.mark.parametrize("key", ["", "a b", "ü", "x" * 256])
def test_malformed_idempotency_keys(service: ServiceProcess, key: str) -> None:
    headers = {"Idempotency-Key": key.encode()}
    response = service.client.post("/v1/videos", json={"prompt": "a"}, headers=headers)  # type: ignore[arg-type]
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_idempotency_key")


def test_headers(service: ServiceProcess) -> None:
    response = service.client.get("/v1/videos", headers={"Origin": "https://evil.example"})
    assert "server" not in response.headers
    assert not [name for name in response.headers if name.startswith("access-control")]
    assert response.headers["x-content-type-options"] == "nosniff"
    page = service.client.get("/")
    assert "default-src 'none'" in page.headers["content-security-policy"]


def test_request_ids_are_taken_over_only_if_harmless(service: ServiceProcess) -> None:
    assert (
        service.client.get("/livez", headers={"X-Request-Id": "trace-1"}).headers["x-request-id"] == "trace-1"
    )
    for bad in ("a b", "x" * 200, "<script>"):
        made = service.client.get("/livez", headers={"X-Request-Id": bad}).headers["x-request-id"]
        assert made.startswith("req_")


def test_secrets_prompts_and_paths_are_in_no_log_and_no_answer(start: Callable[..., ServiceProcess]) -> None:
    service = start()
    secret_prompt = "the launch code is swordfish"
    video = service.finished(service.create(secret_prompt)["id"])
    service.create("[crash@1]")
    answers = [
        video,
        service.client.get("/v1/startup").text,
        service.client.get("/metrics").text,
        service.client.get("/v1/status").text,
    ]
    service.client.post("/v1/videos?token=hush-hush", json={"prompt": 5})
    assert service.terminate() == 0
    for text in (service.log(), *map(str, answers[1:])):
        assert KEY not in text
        assert "swordfish" not in text
        assert "hush-hush" not in text
    assert str(service.state) not in "".join(map(str, answers))


def test_the_service_does_not_start_without_keys(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    code = "import sys; from runtime.cli import main; sys.exit(main(['serve', '--bundle', sys.argv[1], '--port', '0']))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 2
    assert "refuses to start without API keys" in done.stderr


def test_a_missing_directory_is_a_bad_artifact(tmp_path: Path) -> None:
    code = "import sys; from runtime.cli import main; sys.exit(main(['serve', '--allow-unauthenticated', '--bundle', sys.argv[1]]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 3
    assert "manifest.json" in done.stderr


def test_addresses_in_requests_are_guarded(start: Callable[..., ServiceProcess]) -> None:
    with picture_site() as port:
        service = start(
            COLDFRAME_SERVE_ALLOW_URL_INPUTS="1", FAKE_ALLOWED_ADDRESSES="127.0.0.1", FAKE_NAMES="pictures.example=127.0.0.1"
        )  # fmt: skip
        assert service.create(first_frame=f"http://pictures.example:{port}/a.png")["task"] == "fl2va"
        for host in ("169.254.169.254", "127.0.0.2", "[::ffff:10.0.0.1]", "[::1]", "10.0.0.1"):
            response = service.client.post(
                "/v1/videos", json={"prompt": "a", "first_frame": f"http://{host}/a.png"}
            )
            assert (response.status_code, response.json()["error"]["code"]) == (400, "url_not_allowed")
            assert response.json()["error"]["param"] == "first_frame"


@contextlib.contextmanager
def picture_site() -> Iterator[int]:
    """Port of a server that answers every path with a picture."""
    picture = (ROOT / "tests/cases/inputs/images/good.png").read_bytes()

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "image/png")
            self.send_header("Content-Length", str(len(picture)))
            self.end_headers()
            self.wfile.write(picture)

    site = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=site.serve_forever, args=(0.01,))
    thread.start()
    yield site.server_address[1]
    site.shutdown()
    thread.join()
    site.server_close()


def test_the_server_process_never_imports_torch(service: ServiceProcess) -> None:
    service.finished(service.create()["id"])
    mapped = Path(f"/proc/{service.process.pid}/maps").read_text()
    assert "/torch/" not in mapped
    assert "numpy" not in mapped
