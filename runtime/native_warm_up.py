"""First uses of the GPU's libraries while `import torch` is still running, without the interpreter lock.

    libraries   handles of cuBLAS and cuDNN (`runtime.native_libraries`)
    operators   the family's operators, each once, through torch's C interface (`runtime.native_torch`)
    attention   the denoiser's attention plan: a second one, on the thread that denoises, costs less than the first

Off by default: whether it is worth its share of the interpreter lock is measured by `scripts.bench.first_use`. Whatever fails is
a note on the timeline and is done later, as without it. Standard library only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

from loader.errors import CapabilityError, RequestError
from runtime.native_libraries import create_handles
from runtime.native_torch import NativeTorch
from runtime.torch_preload import TorchInstall

ITEMS = ("libraries", "operators", "attention")

Operations = Callable[[NativeTorch, Collection[str]], Iterator[str]]
"""Runs the operations of the items, one at each step; yields the name of each when it is done."""


def chosen_items(setting: str) -> tuple[str, ...]:
    """Items of a setting: `none`, `all`, or names separated by commas. Raises: RequestError: an unknown name."""
    if setting in ("all", "none"):
        return ITEMS if setting == "all" else ()
    items = tuple(name.strip() for name in setting.split(",") if name.strip())
    unknown = sorted(set(items) - set(ITEMS))
    if unknown:
        raise RequestError(
            "unknown item", where="native_warm_up", found=unknown, expected=["all", "none", *ITEMS]
        )
    return items


def warm_natively(
    install: TorchInstall,
    device: str,
    items: Collection[str],
    operations: Operations,
    is_over: Callable[[], bool],
) -> dict[str, Any]:
    """Run the items on this thread until all are done or `is_over`.

    Args:
        install: its libraries are mapped. device: `cuda`, or `cpu` for trying it.
        is_over: looked at between two operations.
    Returns: facts for the timeline: seconds of each operation, in order; problems.
    """
    problems: list[str] = []
    seconds: dict[str, float] = {}
    last = time.monotonic()

    def done(name: str) -> None:
        nonlocal last
        now = time.monotonic()
        seconds[name], last = round(now - last, 4), now

    if "libraries" in items and device == "cuda":
        problems += create_handles()
        done("libraries")
    native = None
    try:
        native = NativeTorch(install, device)
        for name in operations(native, items):
            done(name)
            if is_over():
                problems.append(f"torch was ready after {name}")
                break
    except CapabilityError as error:
        problems.append(str(error))
    finally:
        if native is not None:
            native.close()
    return {"items": list(items), "seconds": seconds, "problems": problems}
