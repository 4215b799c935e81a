"""Deployment settings: `COLDFRAME_*` variables and flags, read once into one frozen dataclass.

Standard library only. Nothing else in the worker reads the environment.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loader.errors import RequestError

PREFIX = "COLDFRAME_"


@dataclass(frozen=True)
class Settings:
    """One worker's deployment.

    Args:
        bundle: prepared directory.
        manifest_sha256: pinned SHA-256 of its manifest.json; empty: not pinned.
        device: `auto` takes CUDA when a driver and a device are there, unless `CUDA_VISIBLE_DEVICES` hides it.
        task: order of use that a worker loads before it has seen a request.
        schedule: step schedule of what is loaded before a request is known; empty: `base-49` if it is prepared, else the first.
        timeline: file for the start's timeline (JSON); a picture is written beside it. Empty: none.
        verify: how loaded bytes are checked (`edges`, `full`, `auto`).
        rehash_threads: hash every byte of the directory after the first request, with so many threads of the lowest priority;
            0: not. Damage ends the worker.
        ring_gib: size of the pinned ring; 0: chosen from the machine.
        reader_threads: 0: chosen from the machine.
        storage_gbps: throttle for experiments, in 10^9 bytes per second; 0: none.
        loader_path: force a rung of the loader's fallback ladder (U, A to E); empty: probed.
        host_reader: with several GPUs, `shared`: one reader and one ring for the host's ranks; `own`: one each.
        nccl: with several GPUs of one host, who makes the communicator: `early`: a thread during the import of torch, or
            `torch`, once it is imported.
        rank_limit_s: with several ranks, silence or a step that counts as a hang; longer than the longest step.
        encoder_processes: H.264 encoders beside the worker; 0: chosen from the machine.
        encoder_codec: `libx264`, or `h264_nvenc` where the GPU has an encoder.
        encoder_preset: of that codec; the fastest by default, since the last unit's encoding is waited for.
        encoder_crf: constant quality, 0 to 51, lower is better.
        torch_trims: shortcuts of `import torch` to take, comma separated; `all` or `none`.
        attention: backend of the denoiser on a GPU; `auto` takes FlashAttention-3 where it is installed and the device is
            an sm_90, else cuDNN; another name that one or none.
        warm_up: what of the first evaluation is paid behind the load: `all` as far as there is time, `none`, or some of
            memory, products, step, comma separated.
        native_warm_up: first uses during the import of torch: `auto` on releases of torch that were tried, `none`, `all`,
            or some of libraries, kernels, operators, attention, step, comma separated.
        cpu_threads: torch's threads on the CPU; 0: torch's own choice.
        log_level: of the JSON log on stderr.
    """

    bundle: str = ""
    manifest_sha256: str = ""
    device: str = "auto"
    task: str = "t2va"
    schedule: str = ""
    timeline: str = ""
    verify: str = "edges"
    rehash_threads: int = 0
    ring_gib: float = 0.0
    reader_threads: int = 0
    storage_gbps: float = 0.0
    loader_path: str = ""
    host_reader: str = "shared"
    nccl: str = "early"
    rank_limit_s: float = 300.0
    encoder_processes: int = 0
    encoder_codec: str = "libx264"
    encoder_preset: str = "ultrafast"
    encoder_crf: int = 18
    torch_trims: str = "all"
    attention: str = "auto"
    warm_up: str = "all"
    native_warm_up: str = "auto"
    cpu_threads: int = 0
    log_level: str = "INFO"


CHOICES: dict[str, tuple[str, ...]] = {
    "device": ("auto", "cpu", "cuda"),
    "task": ("t2va", "fl2va"),
    "verify": ("edges", "full", "auto"),
    "encoder_codec": ("libx264", "h264_nvenc"),
    "host_reader": ("shared", "own"),
    "nccl": ("early", "torch"),
    "attention": ("auto", "cudnn", "flash", "flash3", "efficient", "math"),
    "loader_path": ("", "U", "A", "B", "C", "D", "E"),
    "log_level": ("DEBUG", "INFO", "WARNING", "ERROR"),
}
LISTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "torch_trims": (
        ("all", "none"),
        ("gc", "preload", "bytecode", "frames", "realpath", "meta", "quantization", "extras"),
    ),
    "warm_up": (("all", "none"), ("memory", "products", "step")),
    "native_warm_up": (("auto", "all", "none"), ("libraries", "kernels", "operators", "attention", "step")),
}
"""Settings that are one word of the first kind, or some of the second, comma separated."""
RANGES: dict[str, tuple[float, float]] = {
    "rehash_threads": (1, 64),
    "ring_gib": (0.0625, 4096),
    "reader_threads": (1, 256),
    "storage_gbps": (1e-6, 10_000),
    "rank_limit_s": (1, 86_400),
    "encoder_processes": (1, 256),
    "encoder_crf": (0, 51),
    "cpu_threads": (1, 1024),
}
MAY_BE_ZERO = (
    "rehash_threads", "ring_gib", "reader_threads", "storage_gbps", "encoder_processes", "cpu_threads",
)  # fmt: skip
_PRESETS = {
    "libx264": (
        "ultrafast", "superfast", "veryfast", "faster", "fast", "medium", "slow", "slower", "veryslow", "placebo",
    ),
    "h264_nvenc": (
        "default", "slow", "medium", "fast", "hp", "hq", "bd", "ll", "llhq", "llhp", "lossless", "losslesshp",
        "p1", "p2", "p3", "p4", "p5", "p6", "p7",
    ),
}  # fmt: skip


def settings_from_environment(environ: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
    """Settings from `COLDFRAME_<FIELD>` variables; keyword arguments (flags) that are not None win.

    Raises: RequestError: an unknown `COLDFRAME_` variable, or a value that does not parse (all of them together).
    """
    environ = os.environ if environ is None else environ
    fields = {field.name: field for field in dataclasses.fields(Settings)}
    values: dict[str, Any] = {}
    problems: list[str] = []
    for variable in sorted(name for name in environ if name.startswith(PREFIX)):
        name = variable.removeprefix(PREFIX).lower()
        if name in fields:
            values[name] = environ[variable]
        elif not variable.startswith(OTHER_PROGRAMS + OTHER_VARIABLES):
            problems.append(f"{variable} is unknown; known: {', '.join(PREFIX + f.upper() for f in fields)}")
    values.update({name: value for name, value in overrides.items() if value is not None})
    for name in list(values):
        try:
            values[name] = _parse(name, fields[name].default, values[name])
        except ValueError as error:
            problems.append(str(error))
    try:
        _check_preset(values)
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise RequestError("; ".join(problems), where="settings")
    return Settings(**values)


OTHER_PROGRAMS = ("COLDFRAME_SERVE_", "COLDFRAME_API_KEYS", "COLDFRAME_MODAL_", "COLDFRAME_FAL_")
"""How variables of the service and of the platforms' applications begin. They start workers without these: some are secrets."""
OTHER_VARIABLES = ("COLDFRAME_VENV", "COLDFRAME_ALLOW_STORAGE_FAULT")
"""Variables of the project's scripts and of fault injection."""


def _parse(name: str, default: Any, value: Any) -> Any:
    wanted = type(default)
    if isinstance(value, str) and wanted is not str:
        try:
            value = wanted(value)
        except ValueError:
            raise ValueError(
                f"{name}={value!r} is not {'a number' if wanted is float else 'an integer'}"
            ) from None
    if name in RANGES:
        _check_range(name, value)
    if name in CHOICES and value not in CHOICES[name]:
        raise ValueError(f"{name}={value!r}; allowed: {', '.join(repr(choice) for choice in CHOICES[name])}")
    if name in LISTS:
        _check_list(name, value)
    if name == "manifest_sha256" and value and not re.fullmatch("[0-9a-fA-F]{64}", value):
        raise ValueError(f"{name}={value!r} is no SHA-256; allowed: 64 hex digits")
    return value


def _check_range(name: str, value: float) -> None:
    low, high = RANGES[name]
    if low <= value <= high or (name in MAY_BE_ZERO and value == 0):
        return
    zero = "0, or " if name in MAY_BE_ZERO else ""
    raise ValueError(f"{name}={value!r}; allowed: {zero}{low:g} to {high:g}")


def _check_list(name: str, value: str) -> None:
    words, items = LISTS[name]
    unknown = [item for item in map(str.strip, value.split(",")) if item and item not in items]
    if value not in words and unknown:
        raise ValueError(
            f"{name}={value!r}: {', '.join(map(repr, unknown))} is unknown; allowed: {', '.join(words)}, "
            f"or some of {', '.join(items)}"
        )


def _check_preset(values: Mapping[str, Any]) -> None:
    codec = values.get("encoder_codec", Settings.encoder_codec)
    preset = values.get("encoder_preset", Settings.encoder_preset)
    if codec in _PRESETS and "encoder_preset" in values and preset not in _PRESETS[codec]:
        raise ValueError(f"encoder_preset={preset!r} of {codec}; allowed: {', '.join(_PRESETS[codec])}")
