"""Peak memory of prepare does not grow with the checkpoint."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench.published_size import write_component
from scripts.tiny_checkpoint import write_tiny_checkpoint
from scripts.tiny_presets import preset

# Both in one process: the second one may only raise the peak of the first. VmHWM, because getrusage's maximum is
# inherited from the process that starts this one.
_MEASURED = """
import sys
from pathlib import Path
import torch, tokenizers  # their memory is not prepare's
from prepare.family import PrepareOptions
from prepare.pipeline import prepare_checkpoint
options = PrepareOptions(tasks=("t2va",), schedules=("base-1",), workers=1)
for checkpoint, target in (sys.argv[1:3], sys.argv[3:5]):
    prepare_checkpoint(Path(checkpoint), Path(target), options)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(int(status["VmHWM"].split()[0]) * 1024)
"""


def _write_checkpoint(folder: Path, num_layers: int) -> int:
    """Bytes of a checkpoint whose transformer has this many layers of gated matrices larger than one piece."""
    small = preset("test")
    transformer = dataclasses.replace(
        small.model.transformer, hidden_size=768, ffn_dim=4 * 768, num_layers=num_layers
    )
    model = dataclasses.replace(small.model, transformer=transformer)
    write_tiny_checkpoint(folder, "test", "diffusers", seed=0)
    for path in (folder / "transformer").iterdir():
        path.unlink()
    write_component(folder, "transformer", dataclasses.replace(small, model=model))
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_peak_memory_is_independent_of_the_checkpoints_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = [_write_checkpoint(tmp_path / str(layers), layers) for layers in (1, 8)]
    places = [str(tmp_path / name) for name in ("1", "out-1", "8", "out-8")]
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, *places], check=True, capture_output=True, text=True
    )
    peaks = [int(line) for line in done.stdout.split()]
    with capsys.disabled():
        lines = (
            f"{size / 1e6:.0f} MB at {peak / 1e6:.0f} MB" for size, peak in zip(sizes, peaks, strict=True)
        )
        sys.stdout.write(f"\n  prepare: {', then '.join(lines)}\n")
    assert sizes[1] - sizes[0] > 100_000_000
    # A buffer of 9 MB is reused or not, as the writer's thread happens to be on time.
    assert peaks[1] - peaks[0] < (sizes[1] - sizes[0]) / 8
