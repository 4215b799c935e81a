"""Distributions of times: constants, named laws, measured samples, mixtures, and platform delays.

Every law draws from a generator handed in, so that a request's draw depends on the seed and its index only and all
policies see the same startups (common random numbers).
"""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from loader.errors import RequestError
from scripts.replay.specs import Spec, parse_number, parse_spec

Floats = NDArray[np.float64]
Z90 = 1.2815515655446004  # standard normal quantile of 0.9


def stream(seed: int, purpose: str) -> np.random.Generator:
    """Independent generator for one purpose (`"startup"`, `"duration"`, …) under one seed."""
    return np.random.default_rng(np.random.SeedSequence([seed, zlib.crc32(purpose.encode())]))


class Law(Protocol):
    """A distribution of non-negative seconds; `text` is the specification it came from."""

    @property
    def text(self) -> str: ...

    def median(self) -> float: ...

    def mean(self) -> float: ...

    def draw(self, rng: np.random.Generator, count: int) -> Floats: ...


@dataclass(frozen=True)
class Constant:
    """Always `value` seconds."""

    value: float

    @property
    def text(self) -> str:
        return f"{self.value:g}"

    def median(self) -> float:
        return self.value

    def mean(self) -> float:
        return self.value

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        return np.full(count, self.value)


@dataclass(frozen=True)
class Lognormal:
    """exp(mu + sigma·Z)."""

    mu: float
    sigma: float
    text: str

    def median(self) -> float:
        return math.exp(self.mu)

    def mean(self) -> float:
        return math.exp(self.mu + self.sigma**2 / 2)

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        return np.exp(self.mu + self.sigma * rng.standard_normal(count))


@dataclass(frozen=True)
class Gamma:
    """Gamma with the given mean; shape 1 is exponential."""

    average: float
    shape: float
    text: str

    def median(self) -> float:
        quantile = np.random.default_rng(0).gamma(self.shape, self.average / self.shape, 200_001)
        return float(np.median(quantile))

    def mean(self) -> float:
        return self.average

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        return rng.gamma(self.shape, self.average / self.shape, count)


@dataclass(frozen=True)
class Uniform:
    """Uniform on [low, high], plus `surcharge` seconds with a probability (an image that must be pulled)."""

    low: float
    high: float
    text: str
    surcharge: float = 0.0
    probability: float = 0.0

    def median(self) -> float:
        return (self.low + self.high) / 2

    def mean(self) -> float:
        return (self.low + self.high) / 2 + self.surcharge * self.probability

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        base = rng.uniform(self.low, self.high, count)
        return base + self.surcharge * (rng.random(count) < self.probability)


@dataclass(frozen=True)
class Crowded:
    """Uniform on [low, high], the upper end growing linearly to `crowded_high` at `crowd` simultaneous starts.

    The stated facts are the two ranges; the linear growth between them is an assumption.
    """

    low: float
    high: float
    crowded_high: float
    crowd: int
    text: str

    def median(self) -> float:
        return (self.low + self.high) / 2

    def mean(self) -> float:
        return (self.low + self.high) / 2

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        """Uniform numbers in [0, 1); `delay` turns one into seconds when the crowd is known."""
        return rng.random(count)

    def delay(self, uniform: float, simultaneous: int) -> float:
        """Seconds for a start with `simultaneous` starts under way, itself included."""
        share = min(max(simultaneous - 1, 0) / (self.crowd - 1), 1.0)
        return self.low + uniform * (self.high + share * (self.crowded_high - self.high) - self.low)


@dataclass(frozen=True)
class Empirical:
    """Draws with replacement from measured samples."""

    samples: tuple[float, ...]
    text: str

    def median(self) -> float:
        return float(np.median(self.samples))

    def mean(self) -> float:
        return float(np.mean(self.samples))

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        return rng.choice(np.asarray(self.samples, dtype=np.float64), count)


@dataclass(frozen=True)
class Mixture:
    """One of several laws per draw, e.g. per region or host kind."""

    parts: tuple[tuple[float, Law], ...]
    text: str

    def median(self) -> float:
        return float(np.median(self.draw(np.random.default_rng(0), 200_001)))

    def mean(self) -> float:
        return sum(weight * law.mean() for weight, law in self.parts)

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        choice = rng.choice(len(self.parts), count, p=[weight for weight, _ in self.parts])
        columns = np.stack([law.draw(rng, count) for _, law in self.parts])
        return np.asarray(columns[choice, np.arange(count)], dtype=np.float64)


def parse_law(text: str, *, where: str = "distribution") -> Law:
    """`7.2`, `fixed:7.2`, `lognormal:p50=7.21,p90=19.88`, `lognormal:mean=54,cv=0.4`, `gamma:mean=50,shape=4`,
    `exponential:mean=50`, `uniform:low=2,high=9`, `empirical:FILE` or `mix:0.7*7.2|0.3*lognormal:p50=20,p90=40`.
    """
    name, _, rest = text.strip().partition(":")
    if name == "mix":
        return _mixture(text, rest, where)
    if name == "empirical":
        return Empirical(read_samples(Path(rest)), text)
    if not rest:
        value = parse_number(name, where=where)
        return _constant(value, where)
    spec = parse_spec(text)
    if spec.name == "fixed":
        return _constant(spec.number("value", position=0), where)
    if spec.name in {"lognormal", "gamma", "exponential", "uniform"}:
        return _named(spec)
    raise RequestError(
        "unknown distribution",
        where=where,
        found=repr(text),
        expected="a number, fixed, lognormal, gamma, exponential, uniform, empirical, mix",
    )


def _constant(value: float, where: str) -> Constant:
    if value < 0:
        raise RequestError("a time is negative", where=where, found=value, expected="≥ 0 seconds")
    return Constant(value)


def _named(spec: Spec) -> Law:
    if spec.name == "uniform":
        spec.only({"low", "high"})
        law = Uniform(spec.number("low"), spec.number("high"), spec.text)
        _require(0 <= law.low <= law.high, spec.text, "0 ≤ low ≤ high")
        return law
    if spec.name == "lognormal" and dict(spec.named).keys() & {"p50", "p90"}:
        spec.only({"p50", "p90"})
        median, high = spec.number("p50"), spec.number("p90")
        _require(0 < median <= high, spec.text, "0 < p50 ≤ p90")
        return Lognormal(math.log(median), math.log(high / median) / Z90, spec.text)
    mean = spec.number("mean", position=0)
    _require(mean > 0, spec.text, "mean > 0")
    if spec.name == "lognormal":
        spec.only({"mean", "cv"}, positions=1)
        variance = math.log1p(spec.number("cv") ** 2)
        return Lognormal(math.log(mean) - variance / 2, math.sqrt(variance), spec.text)
    spec.only({"mean", "shape", "cv"}, positions=1)
    shape = spec.number("shape", spec.number("cv", 1.0) ** -2)
    _require(shape > 0, spec.text, "shape > 0")
    return Gamma(mean, shape, spec.text)


def _require(holds: bool, text: str, expected: str) -> None:
    if not holds:
        raise RequestError("values out of range", where=text, expected=expected)


def _mixture(text: str, rest: str, where: str) -> Mixture:
    parts: list[tuple[float, Law]] = []
    for piece in rest.split("|"):
        weight, star, law = piece.partition("*")
        if not star:
            raise RequestError(
                "a part of a mixture", where=where, found=repr(piece), expected="weight*distribution"
            )
        parts.append((parse_number(weight, where=where), parse_law(law, where=where)))
    total = sum(weight for weight, _ in parts)
    _require(total > 0 and all(weight >= 0 for weight, _ in parts), text, "weights ≥ 0 with a positive sum")
    return Mixture(tuple((weight / total, law) for weight, law in parts), text)


def read_samples(path: Path) -> tuple[float, ...]:
    """Measured times: a JSON list, a JSON object with `startup_s` (list), or a text file with one number a line."""
    if not path.is_file():
        raise RequestError("no such file", where=str(path), expected="a JSON list or one number a line")
    text = path.read_text("utf-8")
    try:
        data = json.loads(text)
        if isinstance(data, dict):
            data = data.get("startup_s")
        values = [float(value) for value in data]
    except (ValueError, TypeError):
        values = [parse_number(line, where=f"{path}: line {number}") for number, line in _numbered(text)]
    if not values:
        raise RequestError("no samples", where=str(path), expected="at least one number")
    if any(not math.isfinite(value) or value < 0 for value in values):
        raise RequestError("a sample is negative or not finite", where=str(path), expected="seconds ≥ 0")
    return tuple(values)


def _numbered(text: str) -> list[tuple[int, str]]:
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    return [(number, line) for number, line in lines if line and not line.startswith(("#", "startup_s"))]
