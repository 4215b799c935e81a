"""Bundles on a platform's volume: download and prepare once, read through once per region. Standard library at the top.

Layout: `hf/<repository>@<revision>/` (deletable afterwards), `prepared/<bundle>/` (immutable; prepare writes beside it
and renames). `prepare` is run as a command, so that this package does not depend on it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from loader.errors import ArtifactError, RequestError

CHUNK = 16 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}")

Download = Callable[[str, str, Path], None]


def download_snapshot(repository: str, revision: str, target: Path) -> None:
    """Fetch a published checkpoint from the Hugging Face hub; resumes. Uses HF_TOKEN of the environment."""
    from huggingface_hub import snapshot_download

    snapshot_download(repository, revision=revision, local_dir=target)


def prepare_bundle(
    repository: str,
    revision: str,
    root: Path,
    bundle: str,
    *,
    force: bool = False,
    options: Sequence[str] = (),
    download: Download = download_snapshot,
) -> str:
    """Make `<root>/prepared/<bundle>`, or leave it as it is. Returns the SHA-256 of its manifest.

    Raises: RequestError: names that are none; ArtifactError: prepare refused the checkpoint (its own text is on stderr).
    """
    import hashlib

    if not _NAME.fullmatch(bundle):
        raise RequestError(
            "not a bundle name", where="bundle", found=repr(bundle), expected="letters, digits, . _ -"
        )
    target = root / "prepared" / bundle
    if force or not (target / "manifest.json").is_file():
        checkpoint = root / "hf" / f"{repository.replace('/', '--')}@{revision}"
        checkpoint.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        download(repository, revision, checkpoint)
        command = [sys.executable, "-m", "runtime.cli", "prepare", str(checkpoint), str(target)]
        command += [
            "--repository",
            repository,
            "--revision",
            revision,
            *options,
            *(["--replace"] if force else []),
        ]
        done = subprocess.run(command, check=False)
        if done.returncode != 0:
            raise ArtifactError("prepare failed", where=str(checkpoint), found=f"exit code {done.returncode}")
    return hashlib.sha256((target / "manifest.json").read_bytes()).hexdigest()


def remove_checkpoint(root: Path, repository: str, revision: str) -> None:
    """Delete a downloaded checkpoint after its bundle has been made."""
    shutil.rmtree(root / "hf" / f"{repository.replace('/', '--')}@{revision}", ignore_errors=True)


def read_through(bundle: Path) -> dict[str, Any]:
    """Read every file of a bundle once. Returns `{bytes, seconds, gbps}` (10^9 bytes per second)."""
    began, total, buffer = time.monotonic(), 0, bytearray(CHUNK)
    for path in sorted(path for path in bundle.rglob("*") if path.is_file()):
        file = os.open(path, os.O_RDONLY)
        try:
            while count := os.readv(file, [buffer]):
                total += count
        finally:
            os.close(file)
    seconds = max(time.monotonic() - began, 1e-9)
    return {"bytes": total, "seconds": round(seconds, 3), "gbps": round(total / seconds / 1e9, 3)}
