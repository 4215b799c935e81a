"""The HTTP service without a GPU: start to open socket, memory, and what a poll costs at 50 polls a second.

`python -m scripts.bench.http_service` starts the service with the fake worker, several times; the figures hold the load of
the machine meanwhile, because other work on it counts against them.
"""

from __future__ import annotations

import http.client
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from scripts.bench.common import target, write_result
from tests.fakes.service import KEY, ServiceProcess

STARTS = 10
RATE, SECONDS, CONNECTIONS = 50, 20, 5
READY_GOAL_S = 0.5
POLL_GOAL_MS = 10.0
HEADERS = {"Authorization": f"Bearer {KEY}"}


def start_seconds(directory: Path, environ: dict[str, str]) -> tuple[float, float, int]:
    """Process start to listening as the service reports it, processor time until then (within 20 ms), and its memory."""
    service = ServiceProcess(directory, environ)
    ticks = Path(f"/proc/{service.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    processor_s = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    listening = next(entry for entry in service.entries() if entry.get("event") == "listening")
    memory = service.rss_bytes()
    service.close()
    return float(listening["ready_s"]), processor_s, memory


def poll(service: ServiceProcess, video: str, milliseconds: list[float]) -> None:
    """One connection's share of the polls, at fixed times: a late answer does not thin out the load."""
    connection = http.client.HTTPConnection("127.0.0.1", service.port)
    period_s = CONNECTIONS / RATE
    due = time.monotonic()
    for _ in range(RATE * SECONDS // CONNECTIONS):
        time.sleep(max(0.0, due - time.monotonic()))
        sent = time.perf_counter()
        connection.request("GET", f"/v1/videos/{video}", headers=HEADERS)
        body = connection.getresponse().read()
        milliseconds.append(1e3 * (time.perf_counter() - sent))
        assert json.loads(body)["id"] == video
        due += period_s
    connection.close()


def poll_milliseconds(directory: Path, environ: dict[str, str]) -> list[float]:
    """Time of every poll of a running job, as a client sees it on a kept connection."""
    service = ServiceProcess(directory, environ).ready()
    video = service.create("[gate@3]")["id"]
    service.at_step(video, 2)
    milliseconds: list[float] = []
    threads = [threading.Thread(target=poll, args=(service, video, milliseconds)) for _ in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    service.close()
    return sorted(milliseconds)


def main() -> int:
    with tempfile.TemporaryDirectory() as root:
        # Deployments ship compiled modules: the first start writes them and does not count.
        environ = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(Path(root) / "bytecode")}
        starts = [start_seconds(Path(root) / f"start-{number}", environ) for number in range(STARTS + 1)][1:]
        times = poll_milliseconds(Path(root) / "poll", environ)
    ready = sorted(inside for inside, _, _ in starts)
    p50, p99 = times[len(times) // 2], times[round(0.99 * len(times)) - 1]
    figures = {
        "server_ready_s": {
            "best": ready[0],
            "median": statistics.median(ready),
            "worst": ready[-1],
            "runs": STARTS,
        },
        "server_start_processor_s": sorted(processor for _, processor, _ in starts),
        "server_memory_bytes": max(memory for _, _, memory in starts),
        "poll_ms": {
            "p50": round(p50, 3),
            "p99": round(p99, 3),
            "max": round(times[-1], 3),
            "polls": len(times),
            "per_second": RATE,
        },
        "load_average": os.getloadavg(),
    }
    targets = {
        "server_ready_s": target(round(statistics.median(ready), 3), READY_GOAL_S, "lower"),
        "poll_overhead_ms_p99": target(round(p99, 3), POLL_GOAL_MS, "lower"),
    }
    path = write_result("http_service", figures, targets)
    print(json.dumps({"figures": figures, "targets": targets}, indent=1))
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
