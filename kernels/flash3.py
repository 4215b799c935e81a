"""FlashAttention-3, where a package brings it compiled for sm_90a; optional, and never compiled here.

Two packages register the same operator under their own names: `fa3_fwd` (forward only, 27 MB) and `flash_attn_3`. Their
Python wrappers are left alone, because those define operators of torch at import; only the extension is loaded. It is
called without masks, lengths or windows: softmax(scale * q k^T) v, all rows or causal, as torch's own backends compute it.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from loader.errors import CapabilityError

PACKAGES = ("fa3_fwd", "flash_attn_3")
MOST_HEAD_DIM = 256
_ARGUMENTS = ("q", "k", "v", "softmax_scale", "is_causal", "num_splits")

Forward = Callable[..., Any]
"""(q, k, v [B, S, H or G, K], softmax_scale=, is_causal=, num_splits=) -> (out [B, S, H, K], …)."""


def obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why it cannot run, or None. Loads nothing, so a package that is there may still not fit this torch."""
    if device.type != "cuda":
        return f"device is {device.type}"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "device is not sm_90"
    if dtype != torch.bfloat16:  # the packages leave out others to be small
        return f"dtype is {dtype}"
    return None if installed() else f"none of the packages {', '.join(PACKAGES)} is installed"


def takes(q: Tensor) -> bool:
    """Whether operands of this form [S, H, K] are among those it is compiled for."""
    return q.dtype == torch.bfloat16 and q.shape[-1] % 8 == 0 and q.shape[-1] <= MOST_HEAD_DIM


def installed() -> str | None:
    """The first package that is there."""
    return next((name for name in PACKAGES if _has_extension(name)), None)


def load() -> Forward:
    """The operator; loads the extension the first time.

    Raises: CapabilityError: no package, a library that does not fit this torch, or an operator of another form.
    """
    name = installed()
    if name is None:
        raise CapabilityError("FlashAttention-3 is not installed", expected=PACKAGES)
    try:
        importlib.import_module(f"{name}._C")
        forward = getattr(torch.ops, name).fwd.default
    except (ImportError, OSError, AttributeError) as cause:
        raise CapabilityError(
            "FlashAttention-3 cannot be loaded", where=name, found=str(cause), hint="use 'auto'"
        ) from cause
    names = [argument.name for argument in forward._schema.arguments]
    missing = [argument for argument in _ARGUMENTS if argument not in names]
    if missing:
        raise CapabilityError("FlashAttention-3 has another form", where=name, found=names, expected=missing)
    found: Forward = forward
    return found


def _has_extension(name: str) -> bool:
    try:
        return importlib.util.find_spec(f"{name}._C") is not None
    except ImportError:
        return False
