"""What platforms do and how their consoles are told: start delays, autoscaler presets, lines to paste.

Sources: delays from the cold-start post's appendix (only the ends of each range are stated; uniform is our choice);
Modal client 1.6.4; fal client 1.83; Knative's default autoscaler map; KEDA, Ray Serve and fal documentation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from loader.errors import RequestError
from scripts.replay.laws import Crowded, Law, Uniform, parse_law
from scripts.replay.options import Options
from scripts.replay.specs import Spec, parse_spec

MODAL_WINDOW_S = (2, 3600)


def parse_delay(text: str) -> Law:
    """`modal`, `fal`, `fal:image_pull=0.2`, `together`, `nebius`, or any distribution."""
    spec = parse_spec(text)
    if spec.name == "modal":
        spec.only(())
        return Crowded(2, 9, 36, 30, text)
    if spec.name == "fal":
        spec.only({"image_pull"})
        return Uniform(3, 15, text, surcharge=60, probability=spec.number("image_pull", 0.0))
    if spec.name in {"together", "nebius"}:
        spec.only(())
        low, high = (16, 90) if spec.name == "together" else (120, 360)
        return Uniform(low, high, text)
    return parse_law(text, where="--scheduling")


def _modal(spec: Spec) -> tuple[str, dict[str, object]]:
    spec.only({"scaledown_window", "min_containers", "max_containers", "buffer_containers"})
    window = spec.number("scaledown_window", 60.0)
    if not MODAL_WINDOW_S[0] <= window <= MODAL_WINDOW_S[1]:
        raise RequestError("a window Modal refuses", where=spec.text, found=window, expected="2 … 3600 s")
    plan = f"fixed:{window:g}+floor:{spec.integer('min_containers', 0)}"
    plan += f"+buffer:{spec.integer('buffer_containers', 0)},active=1"
    return plan, {"binding": "shared", "max_workers": spec.integer("max_containers", 0) or None}


def _fal(spec: Spec) -> tuple[str, dict[str, object]]:
    spec.only(
        {
            "keep_alive",
            "min_concurrency",
            "max_concurrency",
            "concurrency_buffer",
            "concurrency_buffer_perc",
            "scaling_delay",
        }
    )
    floor, spare = spec.integer("min_concurrency", 0), spec.integer("concurrency_buffer", 0)
    percent = spec.number("concurrency_buffer_perc", 0.0)
    plan = f"fixed:{spec.number('keep_alive', 10.0):g}+floor:{max(floor, spare)}+buffer:{spare},percent={percent:g}"
    return plan, {
        "binding": "shared",
        "max_workers": spec.integer("max_concurrency", 0) or None,
        "scale_delay_s": spec.number("scaling_delay", 0.0),
        "fresh_idle_s": None if floor or spare or percent else 10.0,
    }


def _knative(spec: Spec) -> tuple[str, dict[str, object]]:
    spec.only(())
    return "target:u=0.7,window=60,panic=0.1,panic_at=2,grace=30,tick=2", {"binding": "shared"}


def _keda(spec: Spec) -> tuple[str, dict[str, object]]:
    spec.only(())
    return "target:u=1,window=300,panic=0.1,panic_at=1,grace=300,tick=30", {
        "binding": "shared",
        "max_workers": 100,
    }


def _ray_serve(spec: Spec) -> tuple[str, dict[str, object]]:
    spec.only({"max"})
    plan = "target:u=2,window=600,panic=0.05,panic_at=1,grace=600,tick=10+floor:1"
    return plan, {"binding": "shared", "max_workers": spec.integer("max", 1)}


def _serverless_llm(spec: Spec) -> tuple[str, dict[str, object]]:
    spec.only({"keep_alive", "max"})
    return f"fixed:{spec.number('keep_alive', 0.0):g}", {
        "binding": "shared",
        "max_workers": spec.integer("max", 10),
    }


def _simfaas(spec: Spec) -> tuple[str, dict[str, object]]:
    spec.only({"expiry", "max"})
    return f"fixed:{spec.number('expiry', 600.0):g}", {
        "binding": "shared",
        "dispatch": "newest-created",
        "max_workers": spec.integer("max", 1000),
        "queue_limit": 0,
    }


SYSTEMS: dict[str, Callable[[Spec], tuple[str, dict[str, object]]]] = {
    "modal": _modal,
    "fal": _fal,
    "knative": _knative,
    "keda": _keda,
    "ray-serve": _ray_serve,
    "serverless-llm": _serverless_llm,
    "simfaas": _simfaas,
}


def parse_system(text: str, options: Options) -> tuple[str, Options]:
    """`modal:scaledown_window=60,buffer_containers=1`, … → (policy text, options).

    KEDA and Ray Serve are approximations: their separate up and down delays become a stable and a panic window.
    """
    spec = parse_spec(text)
    if spec.name not in SYSTEMS:
        raise RequestError("unknown system", where="--system", found=repr(text), expected=", ".join(SYSTEMS))
    plan, changes = SYSTEMS[spec.name](spec)
    return plan, replace(options, **changes)  # type: ignore[arg-type]


def console_lines(
    retention_s: float, *, floor: int = 0, buffer: int = 0, max_workers: int | None = None
) -> dict[str, list[str]]:
    """Settings as Modal and fal commands, and in words what they cannot express."""
    window = min(max(math.ceil(retention_s), MODAL_WINDOW_S[0]), MODAL_WINDOW_S[1])
    modal = ["modal function autoscaler update APP/FUNC", f"--scaledown-window {window}"]
    modal += [f"--min-containers {floor}", f"--buffer-containers {buffer}"]
    modal += [f"--max-containers {max_workers}"] if max_workers else []
    keep = max(math.ceil(retention_s), 0)
    fal = [
        "fal apps scale APP",
        f"--keep-alive {keep}",
        f"--min-concurrency {floor}",
        f"--concurrency-buffer {buffer}",
    ]
    fal += [f"--max-concurrency {max_workers}"] if max_workers else []
    found = {"modal": [" ".join(modal)], "fal": [" ".join(fal)]}
    if window != retention_s:
        found["modal"].append(
            f"# Modal takes whole seconds from 2 to 3600: {retention_s:g} s became {window} s"
        )
    if keep != retention_s:
        found["fal"].append(f"# fal takes whole seconds: {retention_s:g} s became {keep} s")
    if buffer:
        found["modal"].append("# Modal keeps the buffer only while something runs")
        found["fal"].append("# fal always keeps the larger of minimum and buffer")
    return found
