"""What rank 0 tells the others: the next command, and at every border of a request whether it goes on.

A section is work in which ranks depend on each other. All ranks pass its border together; between sections rank 0 may
give a request up, and the others learn it at their next border. Inside a section a failure is everybody's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from loader.errors import InternalError
from runtime.parallel.guard import Guard
from runtime.parallel.ranks import Ranks
from runtime.pipeline import Cancelled

_GO, _STOP = 1, 2


class Control:
    """One rank's end.

    Args:
        ranks: of a transport on the host's memory, so that a border does not wait for a GPU.
        guard: told about progress.
    """

    def __init__(self, ranks: Ranks, guard: Guard | None = None) -> None:
        self._ranks = ranks
        self._guard = guard
        self._is_inside = False
        self._has_request = False

    @property
    def leads(self) -> bool:
        return self._ranks.rank == 0

    @property
    def can_stop(self) -> bool:
        """Whether a request is under way and no section is: rank 0 may give it up."""
        return self._has_request and not self._is_inside

    @contextmanager
    def request(self) -> Iterator[None]:
        """One request, on all ranks. It ends with a border of its own."""
        self._has_request, self._is_inside = True, False
        yield
        with self.section("end of the request"):
            self._has_request = False

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Raises: Cancelled: rank 0 gave the request up. InternalError: a rank failed, also while the section ran."""
        if self._guard is not None:
            self._guard.progress(name)
            self._guard.check()
        word = self._tell(_GO)
        if word == _STOP:
            self._has_request = False
            raise Cancelled
        if word != _GO:
            raise InternalError("ranks are out of step", where=name, found=word)
        self._is_inside = True
        yield
        self._is_inside = False
        if self._guard is not None:
            self._guard.check()

    def stop(self) -> None:
        """On rank 0: the others leave the request at their next border."""
        assert self.leads, "rank 0 gives requests up"
        assert self.can_stop, "not between two sections of a request"
        self._tell(_STOP)
        self._has_request = False

    def exchange(self, command: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Rank 0's command on all ranks; the others wait here between requests."""
        text = json.dumps(command).encode() if self.leads else b""
        size = self._tell(len(text))
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else None
        data = torch.empty(size, dtype=torch.uint8) if data is None else data
        self._ranks.broadcast(data, 0).wait()
        command = json.loads(bytes(data.tolist()))
        return dict(command)

    def _tell(self, number: int) -> int:
        word = torch.tensor([number])
        self._ranks.broadcast(word, 0).wait()
        return int(word)
