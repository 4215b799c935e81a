"""Step schedules by name, from a file, from the command line; what a worker says to one that is not prepared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loader.errors import RequestError
from loader.manifest import read_manifest
from prepare.cli import prepare_main
from prepare.schedules import find_schedule, parse_sigmas, resolve_schedules, stored_schedules
from runtime.families.minimax_h3.capabilities import capabilities_of
from runtime.families.minimax_h3.request import parse_request
from runtime.schedules import explicit_schedule, named_schedule, round_float32

VIDEO, AUDIO = (1.0, 0.9, 0.5, 0.0), (1.0, 0.75, 0.25, 0.0)
TURBO = explicit_schedule("turbo-3", VIDEO, AUDIO)
INLINE = "turbo-3=1,0.9,.5,0/1,0.75,0.25,0"


def test_inline_and_file_give_the_same_schedule(tmp_path: Path) -> None:
    file = tmp_path / "any.json"
    file.write_text(
        json.dumps({"name": "turbo-3", "video_sigmas": VIDEO, "audio_sigmas": AUDIO, "note": "x"})
    )
    assert parse_sigmas(INLINE) == parse_sigmas(str(file)) == TURBO


def test_stored_four_step_ladder_is_the_shifted_grid() -> None:
    """Source: sigma = s p / (1 + (s - 1) p) at p = 0.999, 0.749, 0.5, 0.25; s = 12 and 3."""
    schedule = find_schedule("fasth3-4")
    for shift, sigmas in ((12.0, schedule.video_sigmas), (3.0, schedule.audio_sigmas)):
        exact = [shift * p / (1 + (shift - 1) * p) for p in (0.999, 0.749, 0.5, 0.25)]
        assert sigmas[:-1] == pytest.approx(exact, rel=3e-7)  # three float32 operations
        assert sigmas[-1] == 0.0


@pytest.mark.parametrize("name", stored_schedules())
def test_every_stored_file_is_a_schedule_of_its_name(name: str) -> None:
    assert find_schedule(name).name == name


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("turbo=1,0.5,0", "not two ladders"),
        ("turbo=1,0/1,0/1,0", "not two ladders"),
        ("turbo=1,x,0/1,0.5,0", "not a number; found 'x'"),
        ("turbo=1,0.5,0.6,0/1,0.5,0.4,0", "does not continue the ladder"),
        ("turbo=1,0.5,0/1,0", "differ in length"),
        ("turbo=1,0.5/1,0.5", "wrong end points"),
        ("turbo=2,0/1,0", "wrong end points"),
        ("turbo=nan,0/1,0", "wrong end points"),
        ("Turbo.1=1,0/1,0", "not a usable name"),
        ("base-3=1,0.9,0.5,0/1,0.9,0.5,0", "name belongs to another schedule; found base-3"),
        ("fasth3-4=1,0/1,0", "name belongs to another schedule"),
        ("nowhere.json", "schedule file cannot be read"),
    ],
)
def test_unusable_ladder_is_refused(text: str, match: str) -> None:
    with pytest.raises(RequestError, match=match):
        parse_sigmas(text)


@pytest.mark.parametrize(
    "content",
    ["[]", "{", '{"name": "a"}', '{"name": "a", "video_sigmas": [1, 0], "audio_sigmas": [1, 0], "shift": 3}'],
)
def test_file_of_another_form_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(content)
    with pytest.raises(RequestError, match=r"--sigmas: s\.json"):
        parse_sigmas(str(tmp_path / "s.json"))


def test_names_and_ladders_are_put_together() -> None:
    chosen = resolve_schedules(("base-2", "base-2"), (TURBO,), "base-49")
    assert [schedule.name for schedule in chosen] == ["base-2", "turbo-3"]
    assert [s.name for s in resolve_schedules((), (TURBO,), "base-49")] == ["turbo-3"]
    assert resolve_schedules((), (), "base-49") == [named_schedule("base-49")]
    other = explicit_schedule("turbo-3", VIDEO, (1.0, 0.7, 0.25, 0.0))
    with pytest.raises(RequestError, match="two step schedules of one name"):
        resolve_schedules((), (TURBO, other), "base-49")


def test_unknown_name_lists_what_is_known() -> None:
    with pytest.raises(RequestError, match=r"base-1 … base-1000, fasth3-8, fasth3-4 – or give .* --sigmas"):
        find_schedule("uniform-8")


def test_worker_serves_the_prepared_ladder_and_names_it_when_asked_for_another(
    tmp_path: Path, diffusers_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out"
    assert prepare_main([str(diffusers_checkpoint), str(target), "--task", "t2va", "--sigmas", INLINE]) == 0
    manifest = read_manifest(target)
    assert list(manifest.orders) == ["t2va/turbo-3"]
    assert list(manifest.options["sigmas"]) == ["turbo-3"]  # type: ignore[call-overload]
    capabilities = capabilities_of(manifest)
    request = parse_request({"prompt": "rain", "schedule": "turbo-3", "seed": 1}, capabilities)
    assert request.schedule.video_sigmas == tuple(map(round_float32, VIDEO))
    with pytest.raises(RequestError, match=r"schedule: .*base-49.*turbo-3"):
        parse_request({"prompt": "rain", "schedule": "base-49", "seed": 1}, capabilities)
