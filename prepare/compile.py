"""Kernels of a prepared directory: Triton sources to cubins, in a process of its own.

The compiler reads its settings from the environment at import, so it gets a clean one; this process never imports
it. The result depends on the sources, the compiler and the sizes only.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernels.aot.compile import clean_environment, sizes_json
from kernels.catalog import ARCHITECTURES, ModelSizes
from kernels.cubin_index import read_index
from loader.errors import CapabilityError

KERNEL_FOLDER = "kernels"


def require_compiler(architectures: Sequence[str]) -> None:
    """Whether these architectures can be compiled here; asked before anything is written.

    Raises: CapabilityError: unknown architecture, or the compiler is not installed.
    """
    unknown = sorted(set(architectures) - set(ARCHITECTURES))
    if unknown:
        raise CapabilityError("unknown architecture", found=unknown, expected=sorted(ARCHITECTURES))
    if architectures and importlib.util.find_spec("triton") is None:
        raise CapabilityError(
            "kernels cannot be compiled: triton is not installed",
            where=", ".join(architectures),
            hint="pip install triton, or prepare without --kernels: the eager operators run instead",
        )


def compile_kernels(
    directory: Path, sizes: ModelSizes, architectures: Sequence[str], *, jobs: int = 1
) -> list[dict[str, Any]]:
    """Compile every kernel of a model into `directory/kernels/<architecture>/`, with `index.json` beside them.

    Args:
        architectures: names of `kernels.catalog.ARCHITECTURES`; the GPU need not be present. None: nothing is done.
        jobs: compiler processes.
    Returns: the manifest's `kernels` list; `file` is relative to `directory/kernels`.
    Raises: CapabilityError: unknown architecture, no compiler installed, or the compiler failed (ends with its
    last lines). ArtifactError: the index it wrote is not what this version expects.
    """
    require_compiler(architectures)
    if not architectures:
        return []
    folder = directory / KERNEL_FOLDER
    command = [sys.executable, "-m", "kernels.aot.compile", "--out", str(folder), "--jobs", str(jobs)]
    command += ["--sizes", sizes_json(sizes)]
    for architecture in architectures:
        command += ["--architecture", architecture]
    with tempfile.TemporaryDirectory() as cache:
        environment = clean_environment(Path(cache), os.environ)
        done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise CapabilityError(
            "kernels could not be compiled",
            where=", ".join(architectures),
            found="\n".join(done.stderr.strip().splitlines()[-8:]),
            hint="install triton, or prepare without kernels: the eager operators run instead",
        )
    return [entry.as_dict() for entry in sorted(read_index(folder), key=lambda entry: entry.file)]
