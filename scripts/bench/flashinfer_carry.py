"""The part of a FlashInfer wheel that `fused_operators` times, small enough to take to a machine without a network.

    pip download --no-deps flashinfer-python==0.7.2.post1 apache-tvm-ffi nvidia-ml-py tabulate cuda-tile einops
    python -m scripts.bench.flashinfer_carry flashinfer_python-*.whl flashinfer.zip      # 62 MB become 26 MB
    python -m zipfile -e flashinfer.zip SITE; python -m zipfile -e apache_tvm_ffi-*.whl SITE; …       # over there
    PYTHONPATH=SITE FLASHINFER_CUDA_ARCH_LIST=9.0a python -m scripts.bench.fused_operators

Its operators are compiled on first use (nvcc, ninja). Left out: generated kernels of other models and architectures.
"""

from __future__ import annotations

import argparse
import zipfile
from pathlib import Path

_SOURCES = "flashinfer/data/csrc/"
_MAX_SOURCE_BYTES = 64 << 10  # hand-written sources are smaller, generated ones are not
_LEFT_OUT = ("flashinfer/moe_ep/kernel_src/",)
_CUTLASS, _CUTLASS_HEADERS = "flashinfer/data/cutlass/", "flashinfer/data/cutlass/include/"


def is_carried(name: str, size: int) -> bool:
    """Whether a file of the wheel is needed to import it and to compile its norms and activations."""
    if name.startswith(_SOURCES):
        return "/" not in name.removeprefix(_SOURCES) and size <= _MAX_SOURCE_BYTES and "cake" not in name
    if name.startswith(_CUTLASS):
        return name.startswith(_CUTLASS_HEADERS)
    return not name.startswith(_LEFT_OUT)


def carry(wheel: Path, out: Path) -> int:
    """Write `out`, a zip of the files to take along; returns its bytes."""
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as target:
        for item in source.infolist():
            if is_carried(item.filename, item.file_size):
                target.writestr(item.filename, source.read(item))
    return out.stat().st_size


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    print(f"{args.out}: {carry(args.wheel, args.out) / 1e6:.1f} MB of {args.wheel.stat().st_size / 1e6:.1f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
