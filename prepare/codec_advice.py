"""Which codec a deployment should use: bytes before the first denoiser entry over the slower of storage and link.

A start cannot be faster than what it does without weights (import, context, warm-up: about 2 s), and before the first byte
and after the last it takes 0.5 s, so `seconds = max(2, 0.5 + entry bytes / min(storage rate, link rate))`, once with the
plain bytes and once with the stored ones. Storage may be host memory: copying out of it at 20 to 30 GB/s is then what a
hot start waits for. Unpacking (600 GB/s with its checksum on an H200) does not count. Where both sides are equal,
`none` is the choice: it runs on every machine. Both constants, and how near they come: `scripts/bench/results/codec_start.json`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from loader.manifest import GroupRecord, Manifest, read_manifest

FLOOR_S = 2.0  # the shortest coded hot start took 2.05 s
LEAD_S = 0.5  # 0.52 and 0.54 s at 11 GB/s, plain and coded; 0.2 s at 1 GB/s
_READ_BYTES = 16 << 20
_SAMPLE_BYTES = 2 << 30
_THREADS = 8


@dataclass(frozen=True)
class Rates:
    """10^9 bytes a second."""

    storage_gbps: float
    link_gbps: float


@dataclass(frozen=True)
class Advice:
    """Bytes before the first entry, plain and stored, and seconds at these rates."""

    rates: Rates
    plain_bytes: int
    stored_bytes: int

    @property
    def plain_s(self) -> float:
        return self._seconds(self.plain_bytes)

    @property
    def stored_s(self) -> float:
        return self._seconds(self.stored_bytes)

    def _seconds(self, size: int) -> float:
        return max(FLOOR_S, LEAD_S + size / 1e9 / min(self.rates.storage_gbps, self.rates.link_gbps))

    @property
    def choice(self) -> str:
        return "ans" if self.stored_s < 0.97 * self.plain_s else "none"

    def __str__(self) -> str:
        storage, link = self.rates.storage_gbps, self.rates.link_gbps
        return (
            f"codec: storage (or memory that holds it) {storage:.2f} GB/s, host to device {link:.1f} GB/s as measured here;"
            f" before the first entry {self.plain_bytes / 1e9:.2f} GB plain, {self.stored_bytes / 1e9:.2f} GB coded;"
            f" max({FLOOR_S:g} s, {LEAD_S:g} s + bytes / slower rate) = {self.plain_s:.1f} s plain, {self.stored_s:.1f} s coded: on machines like this one,"
            f" prepare --codec {self.choice}"
        )


def advise(manifest: Manifest, rates: Rates) -> Advice:
    """From a coded directory, which knows both sizes; its first order counts."""
    groups = list(_entry_groups(manifest))
    return Advice(rates, sum(g.place_end - g.place for g in groups), sum(g.end - g.start for g in groups))


def _entry_groups(manifest: Manifest) -> Iterator[GroupRecord]:
    """Groups before the first block of the denoiser."""
    for name in next(iter(manifest.orders.values()), ()):
        if name.startswith("transformer/blocks."):
            return
        yield manifest.groups[name]


def advise_here(directory: Path) -> Advice:
    """Measure this machine with the directory's own files; needs a CUDA device."""
    manifest = read_manifest(directory)
    files = [directory / file.path for file in manifest.files if file.data_start is not None]
    return advise(manifest, Rates(_storage_gbps(files), _link_gbps()))


def _storage_gbps(files: list[Path]) -> float:
    """Reads what is not in the page cache, as far as the kernel lets go of it; memory-backed storage reads as memory."""
    jobs: list[tuple[int, int]] = []
    descriptors = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in files]
    for descriptor in descriptors:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        size = os.fstat(descriptor).st_size
        jobs += [(descriptor, offset) for offset in range(0, size, _READ_BYTES)]
    jobs = jobs[: _SAMPLE_BYTES // _READ_BYTES]
    started = time.monotonic()
    with ThreadPoolExecutor(_THREADS) as pool:
        read = sum(pool.map(lambda job: len(os.pread(job[0], _READ_BYTES, job[1])), jobs))
    seconds = time.monotonic() - started
    for descriptor in descriptors:
        os.close(descriptor)
    return read / seconds / 1e9


def _link_gbps() -> float:
    import torch

    host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    device.copy_(host)
    torch.cuda.synchronize()
    started = time.monotonic()
    for _ in range(4):
        device.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    return 4 * host.numel() / (time.monotonic() - started) / 1e9
