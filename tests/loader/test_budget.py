"""Threads and ring under made-up containers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from loader.budget import (
    choose_ring,
    cpu_count,
    gpu_addresses,
    memory_headroom,
    near_cpus,
    reader_threads,
    share_of,
)

MIB = 1 << 20
GIB = 1 << 30
CPUS = len(os.sched_getaffinity(0))


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def meminfo(total: int, available: int) -> str:
    return f"MemTotal: {total // 1024} kB\nMemAvailable: {available // 1024} kB\nHugePages_Total: 0\n"


def test_affinity_without_cgroups(tmp_path: Path) -> None:
    assert cpu_count(tmp_path).value == CPUS


@pytest.mark.parametrize(
    ("text", "expected"), [("50000 100000", 1), ("max 100000", CPUS), ("9900000 100000", CPUS)]
)
def test_quota_of_cgroup_2(tmp_path: Path, text: str, expected: int) -> None:
    root = tree(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": text})
    assert cpu_count(root).value == expected


def test_quota_of_cgroup_1(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/box\n3:memory:/box\n",
            "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "100000",
            "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000",
        },
    )
    assert cpu_count(root).value == 1


@pytest.mark.parametrize(("cpus", "threads"), [(1, 4), (2, 4), (8, 8), (64, 16)])
def test_reader_threads(cpus: int, threads: int) -> None:
    assert reader_threads(cpus).value == threads


def test_headroom_without_a_limit_is_what_the_host_has(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/meminfo": meminfo(64 * GIB, 20 * GIB)})
    assert memory_headroom(root).value == 20 * GIB


def test_page_cache_is_headroom_and_shared_memory_is_not(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/meminfo": meminfo(512 * GIB, 400 * GIB),
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/memory.max": str(16 * GIB),
            "sys/fs/cgroup/a/memory.current": str(15 * GIB),
            "sys/fs/cgroup/a/memory.stat": f"anon {GIB}\nfile {13 * GIB}\nshmem {3 * GIB}\n",
            "sys/fs/cgroup/a/b/memory.max": "max",
        },
    )
    choice = memory_headroom(root)
    assert choice.value == 16 * GIB - (15 - 10) * GIB
    assert "limit 16384 MiB" in choice.reason


@pytest.mark.parametrize(
    ("stat", "cache"),
    [
        ({"cache": 2, "shmem": 1, "total_cache": 6, "total_shmem": 4}, 2),
        ({"cache": 6, "shmem": 4}, 2),
        ({"rss": 3}, 0),
    ],
    ids=["hierarchy", "own", "unknown"],
)
def test_page_cache_of_cgroup_1_is_that_of_the_whole_group(
    tmp_path: Path, stat: dict[str, int], cache: int
) -> None:
    root = tree(
        tmp_path,
        {
            "proc/meminfo": meminfo(512 * GIB, 400 * GIB),
            "proc/self/cgroup": "3:memory:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(16 * GIB),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": str(9 * GIB),
            "sys/fs/cgroup/memory/memory.stat": "".join(f"{n} {v * GIB}\n" for n, v in stat.items()),
        },
    )
    assert memory_headroom(root).value == (16 - 9 + cache) * GIB


def test_the_smallest_limit_on_the_path_counts(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/meminfo": meminfo(64 * GIB, 64 * GIB),
            "proc/self/cgroup": "3:memory:/x\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(8 * GIB),
            "sys/fs/cgroup/memory/x/memory.limit_in_bytes": str(32 * GIB),
        },
    )
    assert memory_headroom(root).value == 8 * GIB


@pytest.mark.parametrize(
    ("threads", "total", "headroom", "ring", "slots", "slot_mib"),
    [
        (16, 89 * GIB, 180 * GIB, None, 128, 16),
        (64, 89 * GIB, 180 * GIB, None, 128, 16),
        (16, 89 * GIB, 16 * GIB, None, 64, 16),
        (16, 89 * GIB, 4 * GIB, None, 64, 4),
        (4, 20 * MIB, 180 * GIB, None, 2, 16),
        (16, 89 * GIB, 0, None, 1, 4),
        (16, 89 * GIB, 180 * GIB, 64 * GIB, 512, 16),
        (16, 89 * GIB, 0, 64 * MIB, 4, 16),
    ],
    ids=[
        "default",
        "many-threads",
        "sixteenth",
        "small-slots",
        "small-load",
        "no-memory",
        "pipe-limit",
        "forced",
    ],
)
def test_ring(threads: int, total: int, headroom: int, ring: int | None, slots: int, slot_mib: int) -> None:
    choice = choose_ring(threads, 16 * MIB, total, headroom, ring)
    assert (choice.slots, choice.slot_bytes) == (slots, slot_mib * MIB)
    assert choice.bytes == slots * slot_mib * MIB
    assert choice.reason


def test_near_cpus(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/driver/nvidia/gpus/0000:1B:00.0/information": "",
            "sys/bus/pci/devices/0000:1b:00.0/numa_node": "1\n",
            "sys/devices/system/node/node1/cpulist": "0,500-600\n",
        },
    )
    (address,) = gpu_addresses(root)
    assert near_cpus(address, root) == [0]
    (root / "sys/bus/pci/devices/0000:1b:00.0/numa_node").write_text("-1\n")
    assert near_cpus(address, root) == []
    assert gpu_addresses(tmp_path / "nothing") == []


@pytest.mark.parametrize(("cpus", "sharers", "own"), [(16, 1, 16), (16, 2, 8), (7, 2, 3), (2, 4, 1)])
def test_processes_that_read_at_once_share_the_cpus_out(cpus: int, sharers: int, own: int) -> None:
    assert share_of(cpus, sharers) == own
