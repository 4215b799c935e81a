"""Synthetic request traces: renewal, Poisson, bursty and launch-day arrivals under an hourly profile.

Points are drawn in *operational* time, in which the mean rate is constant, and mapped to the clock through the
cumulative profile Λ. `ref` is the reference workload: a gamma renewal process whose minute counts have the burst
statistics of a production video service, whatever its volume.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loader.errors import RequestError
from scripts.replay.laws import Lognormal, parse_law, stream
from scripts.replay.specs import Spec, parse_number, parse_spec
from scripts.replay.traces import Trace, with_durations

Floats = NDArray[np.float64]
HOUR_S = 3600.0
# A day of a service used mostly in working hours of one continent; mean 1. Only a default for `day=office`.
OFFICE_DAY = (0.35, 0.3, 0.25, 0.25, 0.3, 0.4, 0.6, 0.9, 1.2, 1.5, 1.6, 1.6, 1.5, 1.55, 1.6, 1.6, 1.5, 1.4, 1.3, 1.2, 1.1, 0.9, 0.65, 0.45)  # fmt: skip
COMMON = frozenset({"rate", "days", "hours", "sigma_h", "mean", "cv", "pools", "zipf", "day"})
MAX_REQUESTS = 200_000_000


@dataclass(frozen=True)
class Draw:
    """What a generator gets: its specification, operational rate per second, horizon in seconds, generator."""

    spec: Spec
    rate: float
    horizon_s: float
    rng: np.random.Generator


def synthetic(text: str, seed: int) -> Trace:
    """`ref`, `ref:rate=30,days=2`, `poisson:rate=5,hours=6`, … → Trace; same text and seed, same bytes.

    Common keys: rate (requests/min), days or hours, sigma_h (hourly lognormal factors), day (24 factors joined by `/`,
    or `office`), mean and cv (lognormal generation time), pools and zipf (split over pools).
    """
    spec = parse_spec(text)
    if spec.name not in GENERATORS:
        raise RequestError(
            "unknown workload", where=text, found=spec.name, expected=", ".join(sorted(GENERATORS))
        )
    generator, own, sigma_h = GENERATORS[spec.name]
    spec.only(COMMON | own)
    rate = spec.number("rate", 10.0) / 60
    span_s = spec.number("hours", spec.number("days", 7.0) * 24) * HOUR_S
    if rate <= 0 or span_s <= 0 or rate * span_s > MAX_REQUESTS:
        raise RequestError(
            "rate or length out of range",
            where=text,
            found=f"{rate * span_s:.4g} requests",
            expected=f"1 … {MAX_REQUESTS}",
        )
    factors = _hour_factors(spec, span_s, spec.number("sigma_h", sigma_h), stream(seed, "hours"))
    cumulative = np.concatenate(([0.0], np.cumsum(factors) * HOUR_S))
    clock = np.arange(len(cumulative)) * HOUR_S
    horizon = float(np.interp(span_s, clock, cumulative))
    operational = np.sort(generator(Draw(spec, rate, horizon, stream(seed, "arrivals"))))
    operational = operational[(operational >= 0) & (operational < horizon)]
    arrivals = np.interp(operational, cumulative, clock)
    if len(arrivals) == 0:
        raise RequestError(
            "no request drawn", where=text, found="0 rows", expected="a higher rate or a longer span"
        )
    return _finish(arrivals, spec, seed, span_s)


def _finish(arrivals: Floats, spec: Spec, seed: int, span_s: float) -> Trace:
    count = spec.integer("pools", 1)
    names = tuple(f"pool{index:02d}" for index in range(count)) if count > 1 else ("all",)
    weights = np.arange(1, max(count, 1) + 1, dtype=np.float64) ** -spec.number("zipf", 1.0)
    codes = np.zeros(len(arrivals), dtype=np.int32)
    if count > 1:
        codes = stream(seed, "pools").choice(count, len(arrivals), p=weights / weights.sum()).astype(np.int32)
    trace = Trace(
        arrivals,
        np.zeros(len(arrivals)),
        codes,
        names,
        spec.text,
        {
            "source": "synthetic",
            "spec": spec.text,
            "seed": seed,
            "span_s": span_s,
            "rows_kept": len(arrivals),
        },
    )
    mean, cv = spec.number("mean", 51.5), spec.number("cv", 0.4)
    law = parse_law(f"lognormal:mean={mean!r},cv={cv!r}" if cv > 0 else f"{mean!r}")
    return with_durations(trace, law, seed)


def _hour_factors(spec: Spec, span_s: float, sigma: float, rng: np.random.Generator) -> Floats:
    """[hours] mean-one factors: lognormal noise times the profile of the day."""
    hours = int(np.ceil(span_s / HOUR_S))
    factors = np.exp(sigma * rng.standard_normal(hours) - sigma**2 / 2)
    given = dict(spec.named).get("day")
    if given is None:
        return factors
    day = np.array(
        OFFICE_DAY
        if given == "office"
        else [parse_number(part, where=f"{spec.text}: day") for part in given.split("/")]
    )
    if len(day) != 24 or (day < 0).any() or day.sum() == 0:
        raise RequestError(
            "a day profile", where=spec.text, found=given, expected="24 factors ≥ 0 joined by /, or office"
        )
    return np.asarray(factors * np.resize(day / day.mean(), hours), dtype=np.float64)


def _renewal(draw: Draw, shape: float) -> Floats:
    """Gamma renewal points from 0, without restarts."""
    blocks: list[Floats] = []
    reached = 0.0
    expected = draw.rate * draw.horizon_s
    while reached < draw.horizon_s:
        count = int(expected + 6 * np.sqrt(expected / shape) + 16)
        gaps = draw.rng.gamma(shape, 1 / (draw.rate * shape), count)
        blocks.append(reached + np.cumsum(gaps))
        reached = float(blocks[-1][-1])
    return np.concatenate(blocks)


def _ref(draw: Draw) -> Floats:
    """Squared gap variation c·m: the statistics depend on c only, not on the volume m (requests/min)."""
    return _renewal(draw, 1 / (draw.spec.number("c", 1.9) * draw.rate * 60))


def _gamma(draw: Draw) -> Floats:
    return _renewal(draw, draw.spec.number("gap_cv", 1.0) ** -2)


def _poisson(draw: Draw) -> Floats:
    count = draw.rng.poisson(draw.rate * draw.horizon_s)
    return draw.rng.uniform(0, draw.horizon_s, count)


def _mixed(draw: Draw) -> Floats:
    """Poisson within each minute, the minutes' rates gamma distributed."""
    shape = draw.spec.number("shape", 0.8)
    minutes = int(np.ceil(draw.horizon_s / 60))
    counts = draw.rng.poisson(draw.rate * 60 * draw.rng.gamma(shape, 1 / shape, minutes))
    starts = np.repeat(np.arange(minutes) * 60.0, counts)
    return starts + draw.rng.uniform(0, 60, len(starts))


def _batch(draw: Draw) -> Floats:
    """Poisson groups of geometric size, members spread exponentially over `theta` seconds."""
    repeat, theta = draw.spec.number("p", 0.8), draw.spec.number("theta", 10.0)
    if not 0 <= repeat < 1:
        raise RequestError("a probability", where=draw.spec.text, found=repeat, expected="0 ≤ p < 1")
    groups = draw.rng.poisson(draw.rate * (1 - repeat) * draw.horizon_s)
    starts = draw.rng.uniform(0, draw.horizon_s, groups)
    sizes = draw.rng.geometric(1 - repeat, groups)
    members = np.repeat(starts, sizes)
    return members + draw.rng.exponential(theta, len(members))


def _onoff(draw: Draw) -> Floats:
    """Two-state modulated Poisson: `high` times the low rate during exponential bursts of `on` s, `off` s apart."""
    on, off, high = (
        draw.spec.number("on", 90.0),
        draw.spec.number("off", 400.0),
        draw.spec.number("high", 6.0),
    )
    low_rate = draw.rate * (on + off) / (off + high * on)
    cycles = int(draw.horizon_s / (on + off) * 1.5) + 20
    lengths = np.stack([draw.rng.exponential(off, cycles), draw.rng.exponential(on, cycles)], axis=1).ravel()
    starts = np.concatenate(([0.0], np.cumsum(lengths)[:-1]))
    rates = np.tile([low_rate, high * low_rate], cycles)
    counts = draw.rng.poisson(rates * lengths)
    inside = np.repeat(lengths, counts) * draw.rng.random(counts.sum())
    return np.asarray(np.repeat(starts, counts) + inside, dtype=np.float64)


def _hawkes(draw: Draw) -> Floats:
    """Self-exciting arrivals in branching form: each request triggers `n` more on average, `theta` s later."""
    branching, theta = draw.spec.number("n", 0.7), draw.spec.number("theta", 30.0)
    if not 0 <= branching < 1:
        raise RequestError("a branching ratio", where=draw.spec.text, found=branching, expected="0 ≤ n < 1")
    generation = draw.rng.uniform(
        0, draw.horizon_s, draw.rng.poisson(draw.rate * (1 - branching) * draw.horizon_s)
    )
    found = [generation]
    while len(generation):
        children = draw.rng.poisson(branching, len(generation))
        generation = np.repeat(generation, children)
        generation = generation + draw.rng.exponential(theta, len(generation))
        found.append(generation)
    return np.concatenate(found)


def _spike(draw: Draw) -> Floats:
    """One launch: Poisson at the base rate, times `high` after `rise` s from `at`, decaying over `decay` s."""
    spec = draw.spec
    at, rise = spec.number("at", draw.horizon_s / 4), max(spec.number("rise", 60.0), 1e-9)
    decay, high = spec.number("decay", 1800.0), spec.number("high", 20.0)
    count = draw.rng.poisson(draw.rate * high * draw.horizon_s)
    times = draw.rng.uniform(0, draw.horizon_s, count)
    climbing = np.clip((times - at) / rise, 0, 1)
    fading = np.exp(-np.maximum(times - at - rise, 0) / decay)
    accepted = draw.rng.random(count) * high < 1 + (high - 1) * climbing * fading
    return np.asarray(times[accepted], dtype=np.float64)


Generator = Callable[[Draw], Floats]
# name → (generator, its own keys, default of sigma_h)
GENERATORS: dict[str, tuple[Generator, frozenset[str], float]] = {
    "ref": (_ref, frozenset({"c"}), 0.3),
    "poisson": (_poisson, frozenset(), 0.0),
    "gamma": (_gamma, frozenset({"gap_cv"}), 0.0),
    "mixed": (_mixed, frozenset({"shape"}), 0.0),
    "batch": (_batch, frozenset({"p", "theta"}), 0.0),
    "onoff": (_onoff, frozenset({"on", "off", "high"}), 0.0),
    "hawkes": (_hawkes, frozenset({"n", "theta"}), 0.0),
    "spike": (_spike, frozenset({"at", "rise", "decay", "high"}), 0.0),
}


def from_windows(
    rows: list[dict[str, str]], *, rate_scale: float, mean_s: float, cv: float, seed: int, label: str
) -> Trace:
    """Requests from measured windows of clients: one gamma renewal process per client in operational time.

    Args:
        rows: cells `pool`, `start`, `length` (s), `rate` (requests/s), `cv` (of the gaps) per window.
    The shape changes at window borders without a restart: restarting adds (cv² − 1)/2 requests per window.
    """
    arrivals: list[Floats] = []
    codes: list[NDArray[np.int32]] = []
    names = sorted({row["pool"] for row in rows})
    for code, name in enumerate(names):
        windows = sorted((row for row in rows if row["pool"] == name), key=lambda row: float(row["start"]))
        points = _client_points(windows, rate_scale, stream(seed, f"client {name}"))
        arrivals.append(points)
        codes.append(np.full(len(points), code, dtype=np.int32))
    times, pools = np.concatenate(arrivals), np.concatenate(codes)
    order = np.argsort(times, kind="stable")
    facts = {"source": label, "rate_scale": rate_scale, "seed": seed, "rows_kept": len(times)}
    trace = Trace(times[order], np.zeros(len(times)), pools[order], tuple(names), label, facts)
    return with_durations(trace, parse_law(f"lognormal:mean={mean_s!r},cv={cv!r}"), seed)


def _client_points(windows: list[dict[str, str]], rate_scale: float, rng: np.random.Generator) -> Floats:
    starts = np.array([float(row["start"]) for row in windows])
    lengths = np.array([float(row["length"]) for row in windows])
    expected = np.array([float(row["rate"]) for row in windows]) * rate_scale * lengths
    borders = np.concatenate(([0.0], np.cumsum(expected)))
    shapes = np.array([float(row["cv"]) for row in windows]) ** -2.0
    found: list[float] = []
    # The first gap is started at a random place, so that thin clients are not counted twice at 0.
    at = rng.gamma(shapes[0], 1 / shapes[0]) * rng.random()
    while at < borders[-1]:
        found.append(at)
        window = int(np.searchsorted(borders, at, side="right")) - 1
        at += rng.gamma(shapes[window], 1 / shapes[window])
    points = np.asarray(found)
    window_of = np.clip(np.searchsorted(borders, points, side="right") - 1, 0, len(windows) - 1)
    share = (points - borders[window_of]) / expected[window_of]
    return np.asarray(starts[window_of] + share * lengths[window_of], dtype=np.float64)


def default_duration(mean_s: float = 51.5, cv: float = 0.4) -> Lognormal:
    """The generation-time law of the reference workload."""
    law = parse_law(f"lognormal:mean={mean_s!r},cv={cv!r}")
    assert isinstance(law, Lognormal)
    return law
