"""Random small cases against the simpy model; everything equal to 1e-6 (simpy adds delays, we add to the clock)."""

from __future__ import annotations

import numpy as np
import pytest

from scripts.replay.laws import parse_law, stream
from scripts.replay.options import Options
from scripts.replay.policies import parse_plan
from scripts.replay.simulate import simulate
from scripts.replay.traces import single_pool
from tests.replay.simpy_twin import Twin

VARIANTS = [("bound", None)] + [("shared", cap) for cap in (1, 2, 3, 10, None)]


@pytest.mark.parametrize("engine", ["python", "fleet"])
@pytest.mark.parametrize("dispatch", ["newest-idle", "oldest-idle"])
@pytest.mark.parametrize(("binding", "cap"), VARIANTS)
def test_equals_the_twin(binding: str, cap: int | None, dispatch: str, engine: str) -> None:
    for seed in range(30):
        rng = np.random.default_rng([seed, len(dispatch), cap or 0])
        count = int(rng.integers(1, 61))
        arrivals = np.cumsum(rng.exponential(rng.choice([2.0, 10.0, 40.0]), count))
        durations = rng.gamma(2.0, rng.choice([3.0, 15.0]), count)
        law = parse_law("lognormal:p50=6,p90=15") if seed % 2 else parse_law(f"{rng.uniform(0.5, 30)!r}")
        retention = float(rng.uniform(0.1, 60))
        options = Options(binding=binding, dispatch=dispatch, max_workers=cap, engine=engine, seed=seed)
        startups = law.draw(stream(seed, "startup"), count).tolist()
        found = simulate(single_pool(arrivals, durations), law, parse_plan(f"fixed:{retention!r}"), options)
        twin = Twin(
            arrivals.tolist(),
            durations.tolist(),
            startups,
            retention,
            binding == "shared",
            dispatch == "newest-idle",
            cap,
        ).run()
        assert np.abs(found.waits - twin.waits).max() < 1e-6, seed
        assert (found.starts, found.useless) == (twin.starts, twin.useless), seed
        assert found.idle_s == pytest.approx(twin.idle_s, abs=1e-6), seed
