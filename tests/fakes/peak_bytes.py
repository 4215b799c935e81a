"""Most bytes of tensors alive at once while some code runs, counted below torch's operators."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """Counts storages that operators returned while this is active. `peak` in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and (storage := leaf.untyped_storage()) not in self._seen:
                self._seen.add(storage)
                self.alive += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.peak = max(self.peak, self.alive)
        return result

    def _free(self, size: int) -> None:
        self.alive -= size
