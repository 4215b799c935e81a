"""Clips for the encoder's tests: the mux cases and small synthetic ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

INPUTS = Path(__file__).parents[2] / "cases" / "inputs"
MUX_CASES = [entry for entry in json.loads((INPUTS / "index.json").read_text()) if entry["group"] == "mux"]


def load_case(case_id: str) -> tuple[np.ndarray, np.ndarray]:
    """(frames [F, H, W, 3], audio [channels, samples]) of a mux case."""
    file = next(case["file"] for case in MUX_CASES if case["id"] == case_id)
    with np.load(INPUTS / file) as data:
        return data["frames"], data["audio"]


def moving_frames(count: int, height: int = 32, width: int = 48) -> np.ndarray:
    """A gradient that drifts: content in every frame, no step between neighbours."""
    columns = np.arange(width)[None, None, :, None] + np.arange(count)[:, None, None, None]
    base = 96 + 60 * np.sin(columns / 9) + np.arange(3)[None, None, None, :] * 8
    return np.broadcast_to(base, (count, height, width, 3)).astype(np.uint8)


def tone(frames: int, sample_rate: int = 32_000, amplitude: float = 0.3) -> np.ndarray:
    """Stereo tone as long as `frames` at 24 fps."""
    time = np.arange(round(frames * sample_rate / 24)) / sample_rate
    return (amplitude * np.sin(2 * np.pi * np.array([[440.0], [660.0]]) * time)).astype(np.float32)


def expectation_fields(case: dict[str, Any]) -> dict[str, Any]:
    """The parts of a mux case that `Mp4Expectation` knows."""
    expect = case["expect"]
    return {
        "frames": expect["frames"],
        "audio_samples": expect.get("audio_samples"),
        "clicks": expect.get("clicks", False),
        "allow_silence": "silent" in case["file"],
    }
