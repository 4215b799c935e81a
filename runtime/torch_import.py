"""The one place where a worker imports torch, and the settings it imports it with."""

from __future__ import annotations

import gc


def import_torch(device: str, cpu_threads: int = 0) -> None:
    """Import torch with the collector off, then set what the model's numbers depend on.

    The collector walks the growing heap again and again during the import: 2.65 s became 2.25 s without it
    (CPU build). What exists afterwards lives for the whole process, so it is frozen out of later collections.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        import torch
    finally:
        if was_enabled:
            gc.enable()
    gc.freeze()
    torch.set_grad_enabled(False)
    if cpu_threads:
        torch.set_num_threads(cpu_threads)
    if device == "cuda":  # float32 layers of the model are exact float32 (no TF32)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
