"""Triton sources to cubins with an index, for any architecture, on a machine without a GPU.

    python -m kernels.aot.compile --out DIR --architecture sm_90a [--architecture …] [--sizes JSON] [--jobs N]

Same sources, compiler and options give the same bytes: line information (which holds absolute paths) is off, no
cache is read, and settings of Triton in the environment are dropped. Triton reads its settings when it is
imported, so it is imported inside functions, in processes whose environment `clean_environment` has set.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib
import importlib.util
import json
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from kernels.catalog import (
    ARCHITECTURES,
    MINIMAX_H3,
    OPERATORS,
    ModelSizes,
    Operator,
    Specialisation,
    source_sha256,
    specialisations,
)
from kernels.cubin_index import INDEX_NAME, KernelEntry, index_bytes
from loader.errors import ArtifactError, CapabilityError


def clean_environment(cache: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without Triton's settings, plus those that make the result a function of the sources."""
    kept = {name: value for name, value in environment.items() if not name.startswith(("TRITON_", "PTXAS_"))}
    return kept | {
        "TRITON_CACHE_DIR": str(cache),
        "TRITON_ALWAYS_COMPILE": "1",
        "TRITON_DISABLE_LINE_INFO": "1",
    }


def compile_one(specialisation: Specialisation, architecture: str) -> tuple[KernelEntry, bytes]:
    """One cubin and its entry. Runs in a process with a `clean_environment`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    operator = specialisation.operator
    function = getattr(importlib.import_module(f"kernels.aot.{operator.name}"), operator.name)
    own = {**specialisation.constants, **specialisation.options}
    constants = {**own, "BLOCK": specialisation.block, "NATIVE": 1}
    signature: dict[str, str] = {argument.name: argument.type for argument in operator.arguments}
    signature |= dict.fromkeys(constants, "constexpr")
    _check_signature(operator, function.arg_names, signature)
    promises = {
        (position,): [["tt.divisibility", argument.multiple]]
        for position, argument in enumerate(operator.arguments)
        if argument.multiple >= 16
    }
    compiled = triton.compile(
        ASTSource(function, signature, constants, promises),
        target=GPUTarget("cuda", ARCHITECTURES[architecture], 32),
        options={**_options(specialisation), "num_warps": specialisation.num_warps},
    )
    cubin = bytes(compiled.asm["cubin"])
    return _entry(specialisation, architecture, compiled.metadata, cubin, triton.__version__), cubin


def _options(specialisation: Specialisation) -> dict[str, Any]:
    """Compiler options. Contraction would remove roundings that the eager operators make."""
    return {"enable_fp_fusion": False, "num_stages": 1, "maxnreg": specialisation.max_registers}


def _check_signature(operator: Operator, names: Sequence[str], signature: Mapping[str, str]) -> None:
    if list(names) != list(signature):
        raise ArtifactError(
            "source and catalog disagree about the parameters",
            where=f"kernels/aot/{operator.name}.py",
            found=list(names),
            expected=list(signature),
        )


def _entry(
    specialisation: Specialisation, architecture: str, metadata: Any, cubin: bytes, version: str
) -> KernelEntry:
    operator = specialisation.operator
    digest = hashlib.sha256(cubin).hexdigest()
    registers, stack_bytes = _resources(cubin)
    return KernelEntry(
        operator=operator.name,
        architecture=architecture,
        constants=dict(specialisation.constants),
        symbol=metadata.name,
        arguments=tuple((item.name, item.type, item.multiple) for item in operator.arguments),
        grid=operator.grid,
        block=specialisation.block,
        rows=specialisation.rows,
        num_warps=specialisation.num_warps,
        num_ctas=metadata.num_ctas,
        shared=metadata.shared,
        scratch=metadata.global_scratch_size + metadata.profile_scratch_size,
        file=f"{architecture}/{operator.name}-{digest[:12]}.cubin",
        size=len(cubin),
        sha256=digest,
        source_sha256=source_sha256(operator),
        registers=registers,
        stack_bytes=stack_bytes,
        compiler={
            "name": "triton",
            "version": version,
            "assembler": _assembler_release(architecture),
            "options": {**_options(specialisation), **specialisation.options},
        },
    )


def _assembler_release(architecture: str) -> str:
    """Release of the ptxas that Triton picks for `architecture`, for instance "12.9.86"."""
    from triton.backends.nvidia.compiler import get_ptxas

    path = get_ptxas(ARCHITECTURES[architecture]).path
    text = subprocess.run([path, "--version"], check=True, capture_output=True, text=True).stdout
    match = re.search(r"V(\d+\.\d+\.\d+)", text)
    if match is None:
        raise CapabilityError("assembler does not say its release", where=str(path), found=repr(text))
    return match.group(1)


def _resources(cubin: bytes) -> tuple[int | None, int | None]:
    """Registers a thread and stack bytes from the bundled cuobjdump; None, None if it cannot say."""
    from triton import knobs

    try:
        tool = knobs.nvidia.cuobjdump.path
    except RuntimeError:  # how Triton says that it was installed without the tool
        return None, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], check=False, capture_output=True, text=True)
    match = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout + done.stderr)
    return (int(match.group(1)), int(match.group(2))) if match else (None, None)


def compile_all(
    wanted: Mapping[str, Iterable[Specialisation]], out: Path, jobs: int = 1
) -> tuple[KernelEntry, ...]:
    """Compile every kernel of every architecture into `out`, with `out/index.json` written last.

    Raises: CapabilityError: unknown architecture, or triton is missing. A compiler error is raised as it is.
    """
    unknown = sorted(set(wanted) - set(ARCHITECTURES))
    if unknown:
        raise CapabilityError("unknown architecture", found=unknown, expected=sorted(ARCHITECTURES))
    if importlib.util.find_spec("triton") is None:
        raise CapabilityError("triton is not installed", hint="install triton where kernels are compiled")
    tasks = [(item, architecture) for architecture, items in wanted.items() for item in items]
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as cache,
        ProcessPoolExecutor(
            min(jobs, len(tasks)), mp_context=spawn, initializer=_set_environment, initargs=(cache,)
        ) as pool,
    ):
        results = list(pool.map(compile_one, *zip(*tasks, strict=True)))
    for entry, cubin in results:
        path = out / entry.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(cubin)
    entries = tuple(entry for entry, _ in results)
    (out / INDEX_NAME).write_bytes(index_bytes(entries))
    return entries


def _set_environment(cache: str) -> None:
    cleaned = clean_environment(Path(cache), os.environ)
    os.environ.clear()
    os.environ.update(cleaned)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="kernels.aot.compile", description=__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for <architecture>/*.cubin and index.json"
    )
    parser.add_argument("--architecture", action="append", choices=sorted(ARCHITECTURES), required=True)
    parser.add_argument(
        "--sizes", default=None, help="JSON object with the fields of ModelSizes; MiniMax-H3's"
    )
    parser.add_argument(
        "--tuning", type=int, default=None, help="which tuning of each operator; default: what ships"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--operator", action="append", choices=sorted(OPERATORS), help="only these")
    options = parser.parse_args(arguments)
    sizes = MINIMAX_H3 if options.sizes is None else ModelSizes(**json.loads(options.sizes))
    names = set(options.operator or OPERATORS)
    wanted = {
        architecture: [
            item
            for item in specialisations(sizes, options.tuning, architecture)
            if item.operator.name in names
        ]
        for architecture in options.architecture
    }
    compile_all(wanted, options.out, options.jobs)


def sizes_json(sizes: ModelSizes) -> str:
    """The value of `--sizes`."""
    return json.dumps(dataclasses.asdict(sizes), sort_keys=True)


if __name__ == "__main__":
    main()
