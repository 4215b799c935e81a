"""How many threads and how much ring this container can carry, each choice with its reason. Linux, cgroup v1 and v2."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

MIB = 1 << 20
_DEFAULT_RING = 2 << 30
# Its first pass is slow: small pages, which every process that copies from them maps for itself.
SHARED_RING = 512 * MIB
_MAX_RING = 8 << 30
_SMALL_RING = 512 * MIB
_SMALL_SLOT = 4 * MIB
_MAX_SLOTS = 512  # records and slot numbers of a full ring fit the pipes' 64 KiB
_MIN_THREADS, _MAX_THREADS = 4, 16
_THREADS_ON_SLOW_STORAGE = 64
_UNLIMITED = 1 << 60


class Choice(NamedTuple):
    """A number and why it is that."""

    value: int
    reason: str


class RingChoice(NamedTuple):
    """A ring of `slots` × `slot_bytes`."""

    slots: int
    slot_bytes: int
    reason: str

    @property
    def bytes(self) -> int:
        return self.slots * self.slot_bytes


def cpu_count(root: Path = Path("/")) -> Choice:
    """CPUs this process may use: its affinity, cut by the cgroup's quota. `root`: where /sys and /proc are."""
    allowed = len(os.sched_getaffinity(0))
    quota = min((_quota(folder) for folder in _cgroups(root, "cpu")), default=math.inf)
    if quota < allowed:
        return Choice(max(1, math.ceil(quota)), f"cgroup quota of {quota:g} CPUs, {allowed} allowed")
    return Choice(allowed, f"{allowed} CPUs allowed")


def reader_threads(cpus: int, spare: int = 0) -> Choice:
    """One per CPU, at least 4 because they mostly wait, at most 16 because more gain nothing on a hot cache.

    Args:
        spare: CPUs that are left to others; readers on all of them would slow an import and its uploader down.
    """
    count = min(_MAX_THREADS, max(_MIN_THREADS, cpus - spare))
    left = f", {spare} left to others" if spare else ""
    return Choice(count, f"{cpus} CPUs{left}, between {_MIN_THREADS} and {_MAX_THREADS}")


def share_of(cpus: int, sharers: int) -> int:
    """CPUs for one of several processes that read at the same time."""
    return max(1, cpus // sharers)


def most_threads(threads: int, forced: int | None, throttle: float | None) -> int:
    """How many the reader may start later: network storage may want more than CPUs suggest, experiments want no change."""
    return threads if forced is not None or throttle is not None else _THREADS_ON_SLOW_STORAGE


def memory_headroom(root: Path = Path("/")) -> Choice:
    """Bytes that can still be charged without reclaiming anything but page cache of files."""
    total, available = _meminfo(root)
    limit, left, reason = total, available, f"{available // MIB} MiB available of {total // MIB} on the host"
    for folder in _cgroups(root, "memory"):
        here = _memory_limit(folder)
        if here >= limit:
            continue
        cache = _page_cache(_stat(folder))
        charged = _number(folder / "memory.current", _number(folder / "memory.usage_in_bytes", 0))
        limit, left = here, min(available, here - (charged - cache))
        reason = f"limit {here // MIB} MiB, {charged // MIB} charged, {cache // MIB} of it page cache"
    return Choice(max(0, left), reason)


def choose_ring(
    threads: int,
    chunk_bytes: int,
    total_bytes: int,
    headroom: int,
    ring: int | None = None,
    slot: int | None = None,
    default: int = _DEFAULT_RING,
) -> RingChoice:
    """Size of the ring.

    Args:
        chunk_bytes: the plan's chunk size, the usual slot. total_bytes: what will be loaded; more slots are useless.
        ring, slot: forced sizes. default: of a ring on a machine with room.
    """
    slot_bytes = slot or chunk_bytes
    if ring is not None:
        size, reason = ring, "forced"
    else:
        size = min(_MAX_RING, max(default, 2 * threads * slot_bytes))
        reason = f"{default // MIB} MiB or 2 slots for each of {threads} threads"
        if headroom // 16 < size:
            size, reason = headroom // 16, f"a sixteenth of {headroom // MIB} MiB of headroom"
        if size < _SMALL_RING and slot is None and slot_bytes > _SMALL_SLOT:
            slot_bytes, reason = _SMALL_SLOT, f"{reason}; small slots"
    slots = min(max(1, size // slot_bytes), _MAX_SLOTS, max(1, -(-total_bytes // slot_bytes)))
    return RingChoice(slots, slot_bytes, reason)


def near_cpus(pci_address: str, root: Path = Path("/")) -> list[int]:
    """Allowed CPUs on the NUMA node of a PCI device; empty where the node is unknown or has none of them."""
    node = _number(root / "sys/bus/pci/devices" / pci_address.lower() / "numa_node", -1)
    if node < 0:
        return []
    try:
        text = (root / f"sys/devices/system/node/node{node}/cpulist").read_text()
    except OSError:
        return []
    return sorted(_cpu_list(text) & os.sched_getaffinity(0))


def gpu_addresses(root: Path = Path("/")) -> list[str]:
    """PCI addresses of the NVIDIA devices here, without CUDA, in the driver's order of addresses."""
    folder = root / "proc/driver/nvidia/gpus"
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def _cpu_list(text: str) -> set[int]:
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _cgroups(root: Path, controller: str) -> list[Path]:
    """Folders from this process's cgroup up to the root, where they exist (in a container often only the root does)."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controller if names else "")
        place = base / path.lstrip("/")
        while place != base and base in place.parents:
            folders.append(place)
            place = place.parent
        folders.append(base)
    return [folder for folder in folders if folder.is_dir()]


def _quota(folder: Path) -> float:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return math.inf if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        quota_us = _number(folder / "cpu.cfs_quota_us", -1)
        return quota_us / _number(folder / "cpu.cfs_period_us", 100_000) if quota_us > 0 else math.inf


def _memory_limit(folder: Path) -> int:
    return _number(folder / "memory.max", _number(folder / "memory.limit_in_bytes", _UNLIMITED))


def _number(path: Path, default: int) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return default


def _stat(folder: Path) -> dict[str, int]:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return {}
    return {name: int(value) for name, _, value in (line.partition(" ") for line in lines)}


def _page_cache(stat: Mapping[str, int]) -> int:
    """Of files. Shared memory is counted with it and cannot be dropped; totals are those of a group and all below it."""
    for cache, shared in (("file", "shmem"), ("total_cache", "total_shmem"), ("cache", "shmem")):
        if cache in stat:
            return stat[cache] - stat.get(shared, 0)
    return 0


def _meminfo(root: Path) -> tuple[int, int]:
    """MemTotal and MemAvailable in bytes; without /proc both are unlimited."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return _UNLIMITED, _UNLIMITED
    table = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
    total = table.get("MemTotal", _UNLIMITED)
    return total, table.get("MemAvailable", total)
