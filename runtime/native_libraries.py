"""Handles of cuBLAS and cuDNN, made once so that the next one of the process is cheap. Standard library only.

Making the first handle initialises the library: it reads the device, finds its kernels and takes the primary context.
Only libraries that are mapped already are used, by their names; what is made here stays until the process ends.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

CREATE: Sequence[tuple[str, tuple[str, ...]]] = (
    ("cublasCreate_v2", ("libcublas.so.13", "libcublas.so.12")),
    ("cudnnCreate", ("libcudnn.so.9",)),
)
"""Function that makes a handle, names that its library may have."""


def create_handles() -> tuple[str, ...]:
    """Make one handle of each library; why not, for each that is not here or refuses."""
    problems = (_create(function, names) for function, names in CREATE)
    return tuple(problem for problem in problems if problem)


def _create(function: str, names: Sequence[str]) -> str:
    library = _mapped(names)
    if library is None:
        return f"{function}: none of {', '.join(names)} is mapped"
    handle = ctypes.c_void_p()
    code: int = getattr(library, function)(ctypes.byref(handle))
    return f"{function} returned {code}" if code else ""


def _mapped(names: Sequence[str]) -> ctypes.CDLL | None:
    for name in names:
        try:
            return ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        except OSError:
            continue
    return None
