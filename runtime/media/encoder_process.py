"""The program of an encoder process: tasks on stdin, results on stdout, pictures in shared memory. No torch.

    python -S -E -I encoder_process.py <descriptor of the picture memory> <module search path as JSON>

A task is one JSON line; a result is one JSON line `{"bytes": n}` and n bytes, or `{"error": {…}}`. The process ends with
its stdin, that is with its parent, whatever way that ends.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import sys
from typing import IO, Any


class Encoder:
    """Executes tasks; keeps the picture memory mapped between them."""

    def __init__(self, file_descriptor: int) -> None:
        self._file_descriptor = file_descriptor
        self._map: mmap.mmap | None = None

    def run(self, task: dict[str, Any]) -> bytes:
        """The result of one task. Raises: WorkerError and whatever the encoder library raises."""
        from runtime.media.unit_encoder import PictureOptions, encode_pictures, encode_sound, probe_encoder

        if task["kind"] == "probe":
            probe_encoder(PictureOptions(**task["options"]))
            return b""
        pixels = self._mapped(task["offset"], task["bytes"])
        if task["kind"] == "pictures":
            options = PictureOptions(**task["options"])
            return encode_pictures(pixels, task["count"], task["layout"], options)
        import numpy as np

        samples = np.frombuffer(pixels, np.float32).reshape(2, -1)
        return encode_sound(samples, task["sample_rate"], task["bit_rate"])

    def _mapped(self, offset: int, size: int) -> memoryview:
        if self._map is None or len(self._map) < offset + size:
            length = os.fstat(self._file_descriptor).st_size
            self._map = mmap.mmap(self._file_descriptor, length, prot=mmap.PROT_READ)
        return memoryview(self._map)[offset : offset + size]


def serve(encoder: Encoder, tasks: IO[bytes], results: IO[bytes]) -> None:
    """Until `tasks` ends. Every failure is an answer: the parent decides what it means."""
    for line in tasks:
        try:
            data = encoder.run(json.loads(line))
            header: dict[str, object] = {"bytes": len(data)}
        except Exception as error:  # noqa: BLE001 (the border of the process)
            data, header = b"", {"error": _describe(error)}
        results.write(json.dumps(header).encode() + b"\n" + data)
        results.flush()


def _describe(error: Exception) -> dict[str, object]:
    from loader.errors import CapabilityError, WorkerError

    if isinstance(error, WorkerError):
        return {
            "is_capability": isinstance(error, CapabilityError),
            "message": error.message,
            "where": error.where,
            "found": None if error.found is None else str(error.found),
            "hint": error.hint,
        }
    return {
        "is_capability": False,
        "message": "the encoder failed",
        "found": f"{type(error).__name__}: {error}",
    }


def main(arguments: list[str]) -> int:
    """Entry of the process; returns its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business, which ends stdin
    sys.path[:] = json.loads(arguments[1])
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints stays out of the results
    import av
    import numpy as np

    av.logging.set_level(av.logging.ERROR)
    del np
    try:
        serve(Encoder(int(arguments[0])), sys.stdin.buffer, results)
    except BrokenPipeError:
        return 0  # the parent is gone
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
