"""Settings come from one prefix, are parsed once, and say what is allowed."""

from __future__ import annotations

import pytest

from loader.errors import RequestError
from runtime.settings import Settings, settings_from_environment


def test_defaults_need_no_environment() -> None:
    assert settings_from_environment({}) == Settings()


def test_variables_and_flags_are_parsed_and_flags_win() -> None:
    settings = settings_from_environment(
        {"COLDFRAME_RING_GIB": "1.5", "COLDFRAME_DEVICE": "cpu", "HOME": "/x"}, device="cuda", bundle="b"
    )
    assert (settings.ring_gib, settings.device, settings.bundle) == (1.5, "cuda", "b")


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        pytest.param({"COLDFRAME_RNG_GIB": "1"}, "COLDFRAME_RNG_GIB is unknown", id="typo"),
        pytest.param({"COLDFRAME_DEVICE": "tpu"}, "'auto', 'cpu', 'cuda'", id="choice"),
        pytest.param(
            {"COLDFRAME_READER_THREADS": "many"}, "reader_threads='many' is not an integer", id="text"
        ),
        pytest.param({"COLDFRAME_STORAGE_GBPS": "-1"}, "negative", id="negative"),
    ],
)
def test_bad_values_are_refused_by_name(environ: dict[str, str], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        settings_from_environment(environ)


def test_variables_of_the_projects_other_programs_are_theirs() -> None:
    """The service, platforms, scripts and tests; a shell that has them set can use every command."""
    names = (
        "SERVE_PORT",
        "API_KEYS",
        "API_KEYS_SHA256",
        "MODAL_GPU",
        "FAL_BUNDLE",
        "VENV",
        "ALLOW_STORAGE_FAULT",
    )
    assert settings_from_environment({f"COLDFRAME_{name}": "x" for name in names}) == Settings()


def test_all_problems_are_reported_together() -> None:
    with pytest.raises(RequestError) as caught:
        settings_from_environment({"COLDFRAME_DEVICE": "tpu", "COLDFRAME_VERIFY": "no"})
    assert "device" in str(caught.value)
    assert "verify" in str(caught.value)
