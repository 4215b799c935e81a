"""What a start may import, and when. Someone who adds a heavy import to the path breaks these tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from prepare.cli import prepare_main
from scripts.tiny_checkpoint import write_tiny_checkpoint

OURS = {"prepare", "runtime", "loader", "kernels", "manifests"}
NEVER = {
    "transformers", "diffusers", "triton", "flashinfer", "accelerate", "safetensors", "torchvision", "torchaudio",
    "matplotlib", "pandas", "scipy", "huggingface_hub", "pydantic", "fastapi", "starlette", "uvicorn", "requests",
    "httpx", "openai", "modal", "fal", "prepare", "scripts",
}  # fmt: skip

LIGHT_MODULES = (
    "runtime.bootstrap",
    "runtime.cli",
    "runtime.engine",
    "runtime.family",
    "runtime.generate",
    "runtime.nodes",
    "runtime.pipeline",
    "runtime.probe",
    "runtime.schedules",
    "runtime.settings",
    "runtime.startup",
    "runtime.timeline",
    "runtime.timeline_views",
    "runtime.torch_import",
    "runtime.weights",
    "runtime.worker",
    "runtime.families.minimax_h3.family",
    "loader.load_plan",
    "loader.manifest",
    "loader.stream",
)


def modules_after(code: str) -> set[str]:
    """Top-level names in `sys.modules` of a fresh interpreter that has run `code`."""
    report = "import sys, json; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, timeout=110, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def bare() -> set[str]:
    """What an interpreter of this environment has loaded before it does anything (site hooks included)."""
    return modules_after("")


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_importing_the_start_loads_the_standard_library_only(module: str, bare: set[str]) -> None:
    added = modules_after(f"import {module}") - bare
    assert {name for name in added if name not in sys.stdlib_module_names} <= OURS


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint, bundle = (tmp_path_factory.mktemp("budget") / name for name in ("checkpoint", "bundle"))
    write_tiny_checkpoint(checkpoint, "test", "native", seed=0)
    assert (
        prepare_main([str(checkpoint), str(bundle), "--schedule", "base-2", "--dtype", "float32", "--json"])
        == 0
    )
    return bundle


def test_a_whole_request_needs_no_heavy_module(bundle: Path, tmp_path: Path, bare: set[str]) -> None:
    arguments = [str(bundle), "--prompt", "rain", "--size", "64x64", "--num-frames", "22", "--device", "cpu"]
    arguments += ["--schedule", "base-2", "--output", str(tmp_path / "video.mp4"), "--json"]
    loaded = (
        modules_after(f"from runtime.cli import main\nassert main(['generate', *{arguments!r}]) == 0") - bare
    )
    assert loaded & NEVER == set()
    assert {"torch", "av", "tokenizers"} <= loaded  # the run really happened in that process


def test_reading_starts_before_any_heavy_import(bundle: Path) -> None:
    code = f"""
import sys
import loader.stream
real = loader.stream.start
def start(*args, **kwargs):
    heavy = {{"torch", "numpy", "av", "PIL", "tokenizers"}} & set(sys.modules)
    assert not heavy, heavy
    return real(*args, **kwargs)
loader.stream.start = start
from runtime.cli import main
assert main(["probe", {str(bundle)!r}, "--size", "64x64", "--num-frames", "22", "--device", "cpu"]) == 0
"""
    assert "torch" in modules_after(code)
