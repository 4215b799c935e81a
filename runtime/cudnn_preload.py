"""Map cuDNN's libraries while torch is being imported, so that the first attention finds them in memory.

cuDNN opens its parts when an operation first needs them. A thread opens them earlier, once torch's own libraries are in:
opening libraries is serial in a process, and torch must not wait. Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from pathlib import Path

_PARTS = ("graph", "ops", "heuristic", "engines_runtime_compiled", "engines_precompiled")
_POLL_S = 0.02


def start_cudnn_preload(site: Path, given_up: threading.Event) -> threading.Thread | None:
    """Start the thread; None where torch's cuDNN package is not in `site` (the folder that holds `torch`).

    Args:
        given_up: set when the start has failed, so that the thread waits for torch no longer.
    """
    folder = site / "nvidia" / "cudnn" / "lib"
    paths = [folder / f"libcudnn_{part}.so.9" for part in _PARTS]
    paths = [path for path in paths if path.exists()]
    if not paths:
        return None
    thread = threading.Thread(
        target=_open_after_torch, args=(paths, given_up), name="cudnn preload", daemon=True
    )
    thread.start()
    return thread


def _open_after_torch(paths: list[Path], given_up: threading.Event) -> None:
    while "torch._C" not in sys.modules:
        if given_up.wait(_POLL_S):
            return
    library = ctypes.CDLL(None)
    library.dlopen.argtypes = (ctypes.c_char_p, ctypes.c_int)
    library.dlopen.restype = ctypes.c_void_p
    for path in paths:
        # A part that cannot be opened here is cuDNN's to report when it needs it.
        library.dlopen(os.fsencode(path), os.RTLD_LAZY | os.RTLD_LOCAL)
