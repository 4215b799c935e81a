"""Inference contracts of distilled releases: self-consistent, known, and equal to the scheduler configurations."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from loader.errors import ArtifactError
from prepare.families.minimax_h3.contract import CONTRACT_NAME, read_contract
from tests.prepare.cases import CASES, case_path, says


@pytest.mark.parametrize("case_id", ["T18"])
def test_good_contract_is_read(case_id: str) -> None:
    contract = read_contract(case_path(case_id), is_distilled=True)
    expected = CASES[case_id]["expect"]
    assert contract is not None
    assert list(contract.steps) == expected["schedule"]
    assert (contract.video_shift, contract.audio_shift) == (expected["shift_video"], expected["shift_audio"])
    assert contract.schedule == "fasth3-8"


@pytest.mark.parametrize("case_id", ["T19", "T20", "T21", "T22", "T23"])
def test_bad_contract_is_refused(case_id: str) -> None:
    with pytest.raises(ArtifactError) as refused:
        read_contract(case_path(case_id), is_distilled=True)
    assert says(case_id, str(refused.value))


def test_base_checkpoint_needs_no_contract() -> None:
    assert read_contract(case_path("T23"), is_distilled=False) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("guidance_scale", 4.0),
        ("guidance_scale", True),
        ("task", "ref2va"),
        ("video_scheduler_shift", 12.0),
        ("audio_scheduler_shift", None),
        ("dmd_denoising_steps", "999"),
        ("dmd_denoising_steps", [999.0, 874]),
    ],
)
def test_changed_value_is_refused_by_its_key(key: str, value: object, tmp_path: Path) -> None:
    root = Path(shutil.copytree(case_path("T18"), tmp_path / "tree"))
    table = json.loads((root / CONTRACT_NAME).read_text())
    (root / CONTRACT_NAME).write_text(json.dumps({**table, key: value}))
    with pytest.raises(ArtifactError, match=key):
        read_contract(root, is_distilled=True)
