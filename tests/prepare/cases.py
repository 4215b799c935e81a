"""Case inputs of `tests/cases/inputs` by id."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

INPUTS = Path(__file__).parents[1] / "cases" / "inputs"
CASES: dict[str, dict[str, Any]] = {
    case["id"]: case for case in json.loads((INPUTS / "index.json").read_text())
}


def case_path(case_id: str) -> Path:
    """The input's file or folder."""
    return INPUTS / CASES[case_id]["file"]


def says(case_id: str, message: str) -> bool:
    """Whether a refusal's text holds one of the words that the case asks for."""
    return any(word.lower() in message.lower() for word in CASES[case_id]["expect"]["say"])


def as_component(case_id: str, folder: Path) -> Path:
    """A component folder whose only weight file is the case's file."""
    folder.mkdir()
    shutil.copyfile(case_path(case_id), folder / "model.safetensors")
    return folder
