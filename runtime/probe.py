"""`coldframe probe`: start a worker as far as the first entry into the denoiser (or some steps further) and time it.

`validate` uses it to prove that a directory can be started; benchmarks use it to time starts and steps. Nothing is
decoded and no file but the timeline is written.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from runtime import bootstrap  # t = 0

if TYPE_CHECKING:
    from runtime.engine import Engine
    from runtime.family import Prepared


def main(argv: Sequence[str]) -> int:
    """Entry of the command; returns the exit code."""
    args = _parser().parse_args(argv)
    from runtime.settings import settings_from_environment

    settings = settings_from_environment(
        bundle=args.bundle,
        device=args.device,
        timeline=args.timeline,
        storage_gbps=args.storage_gbps,
        loader_path=args.loader_path,
    )
    body: dict[str, object] = {"prompt": args.prompt * args.prompt_repeat, "seed": 0}
    options = {"size": args.size, "num_frames": args.num_frames, "schedule": args.schedule}
    body.update({name: value for name, value in options.items() if value is not None})
    engine, prepared = bootstrap.start(settings, body)
    assert prepared is not None
    with engine:
        report = _enter(engine, prepared, args.steps)
        if args.wait:
            engine.wait_resident(lambda done, total: None, every_s=0.01)
        warm = [_enter(engine, prepared, args.steps)["steps_s"] for _ in range(args.repeat - 1)]
        report.update(
            order=prepared.order,
            warm_steps_s=warm,
            timeline=engine.write_timeline(),
            headline=engine.timeline.headline(),
            facts=engine.timeline.facts,
        )
    sys.stdout.write(json.dumps(report, default=str) + "\n")
    return 0


def _enter(engine: Engine, prepared: Prepared, steps: int) -> dict[str, object]:
    """Condition, mark the entry, take `steps` steps; seconds of each, the device synchronised."""
    job, timeline = engine.start_job(prepared), engine.timeline
    with timeline.span("conditioner"):
        job.condition()
        engine.synchronize()
    timeline.mark("conditioner_done")
    stage = job.stages()[0]
    latents = stage.start(None)
    engine.synchronize()
    timeline.mark("first_dit_entry")
    seconds = []
    for step in stage.steps[:steps]:
        start = time.monotonic()
        with timeline.span("step", evaluation=step.evaluation):
            latents = stage.sampler(latents, stage.denoiser(latents, step), step)
            engine.synchronize()
        timeline.mark("first_step_done")
        seconds.append(round(time.monotonic() - start, 6))
    return {**job.report(), "steps_s": seconds}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="coldframe probe",
        description="Start a worker as far as the first entry into the denoiser and print when it got where.",
    )
    parser.add_argument("bundle", help="prepared directory")
    parser.add_argument("--prompt", default="a lamp sways in the rain")
    parser.add_argument(
        "--prompt-repeat", type=int, default=1, help="repeat the prompt's text, for long prompts"
    )
    parser.add_argument("--size", metavar="WxH")
    parser.add_argument("--num-frames", type=int)
    parser.add_argument("--schedule")
    parser.add_argument("--steps", type=int, default=0, help="steps to take after the entry (default: none)")
    parser.add_argument("--repeat", type=int, default=1, help="requests in all; the later ones are warm")
    parser.add_argument(
        "--wait", action="store_true", help="wait until all weights are resident before the end"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--storage-gbps", type=float, help="throttle the reader")
    parser.add_argument(
        "--loader-path", choices=("U", "A", "B", "C", "D", "E"), help="force a rung of the loader"
    )
    parser.add_argument("--timeline", metavar="FILE.json")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
