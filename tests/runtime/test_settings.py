"""Settings come from one prefix, are parsed once, and say what is allowed."""

from __future__ import annotations

import pytest

from loader.errors import RequestError
from runtime.families.minimax_h3.model.warm_denoiser import ITEMS as WARM_ITEMS
from runtime.native_warm_up import ITEMS as NATIVE_ITEMS
from runtime.settings import LISTS, Settings, settings_from_environment
from runtime.torch_import import TRIMS, choose_trims


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
        pytest.param({"COLDFRAME_STORAGE_GBPS": "-1"}, "allowed: 0, or 1e-06 to 10000", id="negative"),
        pytest.param({"COLDFRAME_STORAGE_GBPS": "inf"}, "storage_gbps=inf", id="infinite"),
        pytest.param({"COLDFRAME_RING_GIB": "nan"}, "ring_gib=nan; allowed", id="no number"),
        pytest.param({"COLDFRAME_RING_GIB": "1e-10"}, "0.0625 to 4096", id="ring that rounds to nothing"),
        pytest.param({"COLDFRAME_READER_THREADS": "5000000000"}, "1 to 256", id="threads"),
        pytest.param({"COLDFRAME_CPU_THREADS": "9999999999"}, "1 to 1024", id="torch's threads"),
        pytest.param({"COLDFRAME_RANK_LIMIT_S": "0"}, "allowed: 1 to 86400", id="limit"),
        pytest.param({"COLDFRAME_ENCODER_CRF": "99"}, "allowed: 0 to 51", id="quality"),
        pytest.param(
            {"COLDFRAME_TORCH_TRIMS": "gc, bogus"}, "'bogus' is unknown; allowed: all, none", id="trims"
        ),
        pytest.param({"COLDFRAME_WARM_UP": "memory,all"}, "'all' is unknown", id="word among items"),
        pytest.param({"COLDFRAME_MANIFEST_SHA256": "zz"}, "64 hex digits", id="digest"),
        pytest.param({"COLDFRAME_ENCODER_PRESET": "p3"}, "of libx264; allowed: ultrafast", id="preset"),
        pytest.param(
            {"COLDFRAME_ENCODER_CODEC": "h264_nvenc", "COLDFRAME_ENCODER_PRESET": "ultrafast"},
            "of h264_nvenc; allowed: default",
            id="preset of another codec",
        ),
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


def test_what_is_allowed_is_taken() -> None:
    settings = settings_from_environment(
        {
            "COLDFRAME_RING_GIB": "0",
            "COLDFRAME_TORCH_TRIMS": "gc, frames",
            "COLDFRAME_NATIVE_WARM_UP": "",
            "COLDFRAME_WARM_UP": "memory,",
            "COLDFRAME_MANIFEST_SHA256": "0aF9" * 16,
            "COLDFRAME_ENCODER_CODEC": "h264_nvenc",
            "COLDFRAME_ENCODER_PRESET": "p1",
            "COLDFRAME_ENCODER_CRF": "0",
        }
    )
    assert (settings.ring_gib, settings.encoder_crf, settings.encoder_preset) == (0, 0, "p1")
    assert choose_trims(settings.torch_trims) == ("gc", "frames")


def test_lists_are_those_of_the_code_that_reads_them() -> None:
    assert LISTS["torch_trims"][1] == TRIMS
    assert LISTS["native_warm_up"][1] == NATIVE_ITEMS
    assert set(LISTS["warm_up"][1]) == set(WARM_ITEMS)
