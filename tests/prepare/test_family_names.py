"""A family's name stands in its own folder and in the registry, nowhere else in prepare."""

from __future__ import annotations

import re
from pathlib import Path

from prepare.family import FAMILIES

ROOT = Path(__file__).parents[2] / "prepare"


def _spellings(family: str) -> re.Pattern[str]:
    """`wan_21` -> wan_21, Wan21, families.wan_21 …, in any case."""
    return re.compile("_?".join(map(re.escape, family.split("_"))), re.IGNORECASE)


def test_generic_modules_do_not_know_a_family() -> None:
    files = [path for path in ROOT.rglob("*.py") if "families" not in path.relative_to(ROOT).parts]
    assert len(files) > 15
    found = [
        f"{path.name}: {line.strip()}"
        for path in files
        for line in path.read_text(encoding="utf-8").splitlines()
        for family in FAMILIES
        if _spellings(family).search(line) or "families." in line
    ]
    registry = [f'family.py: FAMILIES = {{"{name}": "{module}"}}' for name, module in FAMILIES.items()]
    assert found == registry


def test_families_know_only_themselves() -> None:
    for family in FAMILIES:
        for path in (ROOT / "families" / family).rglob("*.py"):
            others = [
                name for name in FAMILIES if name != family and name in path.read_text(encoding="utf-8")
            ]
            assert not others, path
