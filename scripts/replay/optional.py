"""Libraries that are not dependencies: imported on use, with an error that names the extra to install."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from loader.errors import CapabilityError

EXTRAS = {"numba": "replay", "pyarrow": "replay", "matplotlib": "plots", "ray": "ray"}


def require(module: str, purpose: str) -> Any:
    """Imports `module`, e.g. `require("pyarrow.parquet", "reading Parquet")`.

    Raises: CapabilityError: not installed; names the extra of this project that brings it.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CapabilityError(
            f"{purpose} needs {package}, which is not installed",
            hint=f"pip install 'coldframe[{EXTRAS[package]}]'",
        ) from error


def is_installed(package: str) -> bool:
    """True if `package` can be found; does not import it."""
    return importlib.util.find_spec(package) is not None
