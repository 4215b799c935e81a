"""Several rank processes on this machine, over gloo."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[3]


class Team:
    """`size` processes of `rank_process`. `call` runs one function on all of them. environments: what each rank has besides."""

    def __init__(
        self, size: int, folder: Path, environments: Sequence[Mapping[str, str]] = (), **times: float
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.folder, self.calls, self.port = folder, 0, port
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.runtime.parallel.rank_process"],
                cwd=ROOT,
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(size),
                    "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(size),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "OMP_NUM_THREADS": "1",
                    "GLOO_SOCKET_IFNAME": "lo",
                    "TEST_GUARD_TIMES": json.dumps(times),
                    **(environments[rank] if environments else {}),
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]

    def wait_ready(self) -> None:
        for answer in self.answers():
            assert answer == {"ready": True}, answer

    def call(self, function: str, **arguments: Any) -> list[Any]:
        """The function's results by rank. Raises: AssertionError: what the ranks reported."""
        self.send(function, **arguments)
        answers = self.answers()
        assert all(answer.get("ok") for answer in answers), answers
        return [torch.load(self._result(rank)) for rank in range(len(self.processes))]

    def send(self, function: str, **arguments: Any) -> None:
        self.calls += 1
        for rank, process in enumerate(self.processes):
            assert process.stdin is not None
            command = {"call": function, "result": str(self._result(rank)), **arguments}
            process.stdin.write(json.dumps(command) + "\n")
            process.stdin.flush()

    def answers(self) -> list[dict[str, Any]]:
        """The next answer of every rank; what it wrote to stderr if it ended instead."""
        return [self.answer(rank) for rank in range(len(self.processes))]

    def last_result(self, rank: int) -> Path:
        """File of what the last call returned."""
        return self._result(rank)

    def close(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for stream in (process.stdout, process.stderr):
                assert stream is not None
                stream.close()

    def answer(self, rank: int) -> dict[str, Any]:
        """One rank's next answer."""
        process = self.processes[rank]
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        return {"ended": process.wait(timeout=30), "stderr": process.stderr.read()}

    def _result(self, rank: int) -> Path:
        return self.folder / f"{self.calls}-{rank}.pt"
