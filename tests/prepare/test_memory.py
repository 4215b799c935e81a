"""Peak memory of prepare does not grow with the checkpoint."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.tiny_checkpoint import write_tiny_checkpoint
from scripts.tiny_presets import preset

# VmHWM, because getrusage's maximum is inherited from the process that starts this one.
_MEASURED = """
import sys
from pathlib import Path
import torch, tokenizers  # their memory is not prepare's
from prepare.family import PrepareOptions
from prepare.pipeline import prepare_checkpoint
options = PrepareOptions(tasks=("t2va",), schedules=("base-1",), workers=1)
prepare_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), options)
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(int(status["VmHWM"].split()[0]) * 1024)
"""


def _checkpoint_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _peak_bytes(folder: Path, hidden: int, num_layers: int) -> tuple[int, int]:
    """(checkpoint bytes, peak bytes of a process that prepares it)."""
    small = preset("test")
    transformer = dataclasses.replace(
        small.model.transformer, hidden_size=hidden, ffn_dim=4 * hidden, num_layers=num_layers
    )
    model = dataclasses.replace(small.model, transformer=transformer)
    write_tiny_checkpoint(folder / "c", dataclasses.replace(small, model=model), "native", seed=0)
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, str(folder / "c"), str(folder / "out")],
        check=True,
        capture_output=True,
        text=True,
    )
    return _checkpoint_bytes(folder / "c"), int(done.stdout)


def test_peak_memory_is_independent_of_the_checkpoints_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gated matrices of 16.8 MB are larger than one piece, so only their number differs between the two."""
    small_bytes, small_peak = _peak_bytes(tmp_path / "small", hidden=1024, num_layers=1)
    large_bytes, large_peak = _peak_bytes(tmp_path / "large", hidden=1024, num_layers=4)
    with capsys.disabled():
        sys.stdout.write(
            f"\n  prepare: {small_bytes / 1e6:.0f} MB peaks at {small_peak / 1e6:.0f} MB, "
            f"{large_bytes / 1e6:.0f} MB at {large_peak / 1e6:.0f} MB\n"
        )
    difference = large_bytes - small_bytes
    assert difference > 70_000_000
    assert large_peak - small_peak < difference / 8
