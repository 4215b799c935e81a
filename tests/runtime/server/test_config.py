"""Settings of the service."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from loader.errors import RequestError
from runtime.server.config import ServerConfig, worker_environment

OPEN = {"COLDFRAME_SERVE_ALLOW_UNAUTHENTICATED": "1", "COLDFRAME_BUNDLE": "b"}


def test_variables_are_read_and_flags_win() -> None:
    environ = {**OPEN, "COLDFRAME_SERVE_MAX_QUEUED": "3", "COLDFRAME_SERVE_PORT": "9000"}
    config = ServerConfig.from_environment(environ, port=9001, host=None)
    assert (config.bundle, config.max_queued, config.port, config.host) == (Path("b"), 3, 9001, "127.0.0.1")


def test_keys_are_kept_as_hashes_only() -> None:
    environ = {
        "COLDFRAME_BUNDLE": "b",
        "COLDFRAME_API_KEYS": "alpha, beta",
        "COLDFRAME_API_KEYS_SHA256": "0" * 64,
    }
    config = ServerConfig.from_environment(environ)
    expected = tuple(hashlib.sha256(key).hexdigest() for key in (b"alpha", b"beta"))
    assert config.api_key_hashes == (*expected, "0" * 64)
    assert "alpha" not in repr(config)


def test_no_keys_is_a_refusal_to_start() -> None:
    with pytest.raises(RequestError, match="refuses to start without API keys"):
        ServerConfig.from_environment({"COLDFRAME_BUNDLE": "b"})


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("COLDFRAME_SERVE_PORT", "http"),
        ("COLDFRAME_SERVE_PORT", "70000"),
        ("COLDFRAME_SERVE_MAX_QUEUED", "0"),
        ("COLDFRAME_SERVE_MAX_QUEUED", "99999999999999999999"),
        ("COLDFRAME_SERVE_BODY_TIMEOUT_S", "nan"),
        ("COLDFRAME_SERVE_JOB_TIMEOUT_S", "inf"),
        ("COLDFRAME_SERVE_STALL_TIMEOUT_S", "-1"),
        ("COLDFRAME_SERVE_RANKS", "0"),
        ("COLDFRAME_SERVE_WORKER_COMMAND", " "),
        ("COLDFRAME_SERVE_INTERRUPTED", "ignore"),
        ("COLDFRAME_SERVE_ALLOW_URL_INPUTS", "yes"),
        ("COLDFRAME_SERVE_MAX_QUEUE", "3"),
        ("COLDFRAME_API_KEYS_SHA256", "1234"),
    ],
)
def test_bad_values_are_named(variable: str, text: str) -> None:
    with pytest.raises(RequestError) as refusal:
        ServerConfig.from_environment({**OPEN, variable: text})
    assert variable.removeprefix("COLDFRAME_").removeprefix("SERVE_").lower() in str(refusal.value).lower()


def test_a_misspelt_variable_is_told_the_right_name() -> None:
    with pytest.raises(RequestError, match="did you mean COLDFRAME_SERVE_MAX_QUEUED"):
        ServerConfig.from_environment({**OPEN, "COLDFRAME_SERVE_MAX_QUEUE": "3"})


def test_a_key_where_a_digest_belongs_is_not_shown() -> None:
    with pytest.raises(RequestError) as refusal:
        ServerConfig.from_environment({**OPEN, "COLDFRAME_API_KEYS_SHA256": "my-plain-secret"})
    assert "my-plain-secret" not in str(refusal.value)


def test_the_worker_sees_neither_keys_nor_service_settings() -> None:
    environ = {
        "PATH": "/bin",
        "COLDFRAME_API_KEYS": "k",
        "COLDFRAME_API_KEYS_SHA256": "h",
        "COLDFRAME_DEVICE": "cpu",
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=secret",
        **OPEN,
    }
    assert worker_environment(environ) == {"PATH": "/bin", "COLDFRAME_DEVICE": "cpu", "COLDFRAME_BUNDLE": "b"}
