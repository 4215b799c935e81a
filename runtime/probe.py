"""`coldframe probe`: start a worker as far as the first entry into the denoiser, print the headline marks, and stop.

`prepare` uses it to prove that a directory can be started; benchmarks use it to time starts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from runtime import bootstrap  # t = 0


def main(argv: Sequence[str]) -> int:
    """Entry of the command; returns the exit code."""
    args = _parser().parse_args(argv)
    from runtime.settings import settings_from_environment

    settings = settings_from_environment(bundle=args.bundle, device=args.device, timeline=args.timeline)
    body: dict[str, object] = {"prompt": args.prompt, "seed": 0}
    options = {"size": args.size, "num_frames": args.num_frames, "schedule": args.schedule}
    body.update({name: value for name, value in options.items() if value is not None})
    engine, prepared = bootstrap.start(settings, body)
    assert prepared is not None
    with engine:
        job = engine.start_job(prepared)
        with engine.timeline.span("conditioner"):
            job.condition()
            engine.synchronize()
        engine.timeline.mark("conditioner_done")
        for stage in job.stages()[:1]:
            stage.start(None)
        engine.synchronize()
        engine.timeline.mark("first_dit_entry")
        report = {
            "order": prepared.order,
            "timeline": engine.write_timeline(),
            "headline": engine.timeline.headline(),
            "facts": engine.timeline.facts,
            **job.report(),
        }
    sys.stdout.write(json.dumps(report, default=str) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="coldframe probe",
        description="Start a worker as far as the first entry into the denoiser and print when it got where.",
    )
    parser.add_argument("bundle", help="prepared directory")
    parser.add_argument("--prompt", default="a lamp sways in the rain")
    parser.add_argument("--size", metavar="WxH")
    parser.add_argument("--num-frames", type=int)
    parser.add_argument("--schedule")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--timeline", metavar="FILE.json")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
