"""Coded weights on one GPU: bytes, decoding, and first DiT entries with and without them.

    python -m scripts.bench.codec [--part decode] [--part ratio] [--part repeat] [--part start --directory DIR]
        [--trained FILE.safetensors|WHEEL ...] [--gbps 11 --gbps 2 ...]

`--directory` is a plain prepared directory of `scripts.bench.full_size` in memory-backed storage; it is measured first,
then coded file by file in its place (it is gone afterwards), and measured again. About 20 s, 30 s, 10 s and 500 s. Starts are
written to `results/codec_start.json`, the other parts to `results/codec.json`, to which those that run apart add. Needs
nvidia-libnvcomp-cu13; nvidia-nvcomp-cu13 for the comparison with its Python `Codec`. For a machine without a network (30 +
4 MB, and two small trained models inside wheels, of float16 and float32, which are cast to bf16 and also coded as they are: an
embedding of 8.2 million values, and 0.3 million of convolutions and an LSTM, a fifth of which are a fixed Fourier basis):

    pip download --no-deps -d wheels nvidia-libnvcomp-cu13==6.0.0.12 wordllama==0.4.0.post1 silero-vad==6.2.3
    pip download --no-deps -d wheels nvidia-nvcomp-cu13==6.0.0.12
    pip install --no-index --no-deps --target site wheels/nvidia_*.whl     # there; then PYTHONPATH=site
    unzip wheels/nvidia_libnvcomp*.whl nvidia/libnvcomp/lib64/libnvcomp.so.6 -d site    # all that a worker needs of it
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from scripts.bench.codec_decode import measure_decoding
from scripts.bench.codec_ratio import measure_ratios
from scripts.bench.codec_repeat import measure_repeats
from scripts.bench.codec_start import measure_starts
from scripts.bench.common import RESULTS, write_result

PARTS = ("decode", "ratio", "repeat", "start")
RATES_GBPS = (22.0, 11.0, 5.5, 2.0, 1.0)


def main() -> int:
    args = _arguments()
    if "start" in args.parts:  # first, while this process has no context whose memory would count
        entries: dict[str, Any] = {}
        started = {"start": measure_starts(args.directory, args.gbps, args.runs, args.schedule, entries)}
        _write(f"{args.name}_start", started, entries, args.out)
    if set(args.parts) == {"start"}:
        return 0
    figures, targets = _before(args.name)
    if "decode" in args.parts:  # before what else loads the library: its first call is timed
        figures["decode"] = measure_decoding()
    if "ratio" in args.parts:
        figures["ratio"] = measure_ratios(args.trained, targets)
    if "repeat" in args.parts:
        figures["repeat"] = measure_repeats()
    _write(args.name, figures, targets, args.out)
    return 0


def _write(name: str, figures: dict[str, Any], targets: dict[str, Any], out: Path | None) -> None:
    path = write_result(name, figures, targets)
    print(json.dumps({"figures": figures, "targets": targets}, indent=1))
    print(path)
    if out is not None:
        shutil.copy(path, out)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", dest="parts", action="append", choices=PARTS)
    parser.add_argument("--directory", type=Path, help="plain prepared directory; it is coded in place")
    parser.add_argument("--trained", type=Path, action="append", default=[], help="trained weights to code")
    parser.add_argument("--gbps", type=float, action="append", help="storage rates of the starts")
    parser.add_argument("--runs", type=int, default=3, help="unthrottled starts")
    parser.add_argument("--schedule", default="base-49")
    parser.add_argument(
        "--name", default="codec", help="name of the result file; of the starts' with `_start`"
    )
    parser.add_argument("--out", type=Path, help="folder for a copy of the result file")
    args = parser.parse_args()
    args.parts = args.parts or [part for part in PARTS if part != "start" or args.directory]
    args.gbps = args.gbps or list(RATES_GBPS)
    if "start" in args.parts and args.directory is None:
        parser.error("--part start needs --directory")
    return args


def _before(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Figures and targets of parts that ran before."""
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        return {}, {}
    result = json.loads(path.read_text("utf-8"))
    return result["figures"], result["targets"]


if __name__ == "__main__":
    sys.exit(main())
