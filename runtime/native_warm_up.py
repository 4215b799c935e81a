"""First uses of the GPU's libraries while `import torch` is still running, without the interpreter lock.

    libraries   handles of cuBLAS and cuDNN of their own (`runtime.native_libraries`)
    kernels     the conditioner's operators that no request changes, each once, through torch's C interface (`runtime.native_torch`)
    operators   those of its shapes: products and attention
    attention   the denoiser's attention plan: a second one, on the thread that denoises, costs less than the first
    step        the denoiser's matrix products

`auto` is `kernels, operators, step` on the releases of torch that were tried on a GPU, and nothing on others: a changed signature
could end the process. Whatever else fails is a note on the timeline and is done later, as without it. What it allocates belongs to torch's
allocator and is given back at the end; only the handles of `libraries` stay. Of a start that fails, or of a torch that is
ready, the operator that runs at that moment is waited for, nothing else. Standard library only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from typing import Any

from loader.errors import RequestError
from runtime.native_libraries import create_handles
from runtime.native_torch import NativeTorch
from runtime.torch_preload import TorchInstall

ITEMS = ("libraries", "kernels", "operators", "attention", "step")
OF_ANY_REQUEST = frozenset({"libraries", "kernels"})
"""Items that need not wait for a request's tokens."""

AUTO = ("kernels", "operators", "step")
TRIED_RELEASES = frozenset({"2.11.0"})
"""Releases of torch with CUDA on which every function that is called here was called on an H200."""

Operations = Callable[[NativeTorch, Collection[str]], Iterator[str]]
"""Runs the operations of the items, one at each step; yields the name of each when it is done."""


def chosen_items(setting: str, version: str) -> tuple[tuple[str, ...], str]:
    """Items of a setting, and why `auto` has none, if so.

    Args:
        setting: `auto`, `none`, `all`, or names separated by commas. version: of torch, with its build: `2.11.0+cu130`.
    Raises: RequestError: an unknown name.
    """
    if setting == "auto":
        release, _, build = version.partition("+")
        if release in TRIED_RELEASES and build.startswith("cu"):
            return AUTO, ""
        tried = ", ".join(sorted(TRIED_RELEASES))
        return (), f"torch {version} is not among the releases that were tried with CUDA: {tried}"
    return named_items(setting), ""


def named_items(setting: str) -> tuple[str, ...]:
    """Items of a setting other than `auto`; arguments and errors as in `chosen_items`."""
    if setting in ("all", "none"):
        return ITEMS if setting == "all" else ()
    items = tuple(name.strip() for name in setting.split(",") if name.strip())
    unknown = sorted(set(items) - set(ITEMS))
    if unknown:
        raise RequestError(
            "unknown item", where="native_warm_up", found=unknown, expected=["auto", "all", "none", *ITEMS]
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
    Returns: facts for the timeline: seconds of each operation, in order; whether all are done, and it was anything; problems.
    """
    problems: list[str] = []
    seconds: dict[str, float] = {}
    is_complete = False
    last = time.monotonic()

    def done(name: str) -> None:
        nonlocal last
        now = time.monotonic()
        seconds[name], last = round(now - last, 4), now

    try:
        if "libraries" in items and device == "cuda":
            problems += create_handles()
            done("libraries")
        with closing(NativeTorch(install, device)) as native:
            for name in operations(native, items):
                done(name)
                if is_over():
                    problems.append(f"torch was ready after {name}")
                    break
            else:
                is_complete = bool(seconds)
    except Exception as error:  # noqa: BLE001 (a border: nothing here may end a start)
        problems.append(str(error) or repr(error))
    return {"items": list(items), "seconds": seconds, "is_complete": is_complete, "problems": problems}
