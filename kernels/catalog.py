"""What is compiled: operators, their arguments and launch rules, the specialisations a model needs. Data, no torch.

A specialisation's key is (operator, architecture, constants). Tuning (tile, warps) is chosen here from measurements
and recorded beside the cubin; nothing is tuned at run time. Tile sizes never change a result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

# Architecture-specific targets: no forward compatibility (a cubin for 10.0 does not run on 10.3).
ARCHITECTURES: Mapping[str, int] = {"sm_90a": 90, "sm_100a": 100, "sm_120a": 120}

# Rows are read in registers by one program; above this they would spill.
MAX_ROW = 16384

AOT_FOLDER = Path(__file__).parent / "aot"

ArgumentType = Literal["*bf16", "*fp16", "*fp32", "*i32", "i32", "fp32"]
GridRule = Literal["rows", "rows x tiles"]


@dataclass(frozen=True)
class Argument:
    """One kernel parameter.

    multiple: promise to the compiler, checked at each launch: bytes for pointers, elements for integers.
    """

    name: str
    type: ArgumentType
    multiple: int = 1


class Tuning(NamedTuple):
    """How one operator is compiled.

    block: BLOCK; 0 stands for the next power of two of the row width D. max_registers: limit a thread, for more
    resident warps; None leaves it to the assembler. rows: ROWS, rows a program does at once; loop: LOOP, how
    often. is_split: the row is read as tiles that add up to D, where at most three do. is_early, is_streamed: EARLY,
    STREAM of the source. The last five are for operators whose `options` name them.
    """

    block: int
    num_warps: int
    max_registers: int | None = None
    rows: int = 1
    loop: int = 1
    is_split: bool = False
    is_early: bool = False
    is_streamed: bool = False


@dataclass(frozen=True)
class Operator:
    """A kernel source `aot/<name>.py` holding a function `<name>`.

    constants: names of the compile-time values that are part of the key. options: names of those that only the tuning
    decides. grid: "rows" = one program a row, or for `Tuning.rows` of them; "rows x tiles" = ceil(width / BLOCK) programs
    a row. tunings: what `SHIPPED` counts in.
    """

    name: str
    arguments: tuple[Argument, ...]
    constants: tuple[str, ...]
    grid: GridRule
    tunings: tuple[Tuning, ...]
    helpers: tuple[str, ...] = ("rounding",)
    options: tuple[str, ...] = ()

    def sources(self) -> tuple[Path, ...]:
        return tuple(AOT_FOLDER / f"{name}.py" for name in (self.name, *self.helpers))


@dataclass(frozen=True)
class Specialisation:
    """One cubin to build for each architecture."""

    operator: Operator
    constants: Mapping[str, int]
    block: int
    num_warps: int
    max_registers: int | None
    rows: int = 1
    options: Mapping[str, int] = field(default_factory=dict)

    def key(self) -> tuple[str, tuple[tuple[str, int], ...]]:
        return self.operator.name, tuple(sorted(self.constants.items()))


def _pointers(*names: str) -> tuple[Argument, ...]:
    """bf16 data: 16-byte vector accesses."""
    return tuple(Argument(f"{name}_ptr", "*bf16", 16) for name in names)


def _half(*names: str) -> tuple[Argument, ...]:
    return tuple(Argument(f"{name}_ptr", "*fp16", 16) for name in names)


def _single(*names: str) -> tuple[Argument, ...]:
    return tuple(Argument(f"{name}_ptr", "*fp32", 16) for name in names)


def _index(*names: str) -> tuple[Argument, ...]:
    return tuple(Argument(f"{name}_ptr", "*i32", 4) for name in names)


def _strides(*names: str) -> tuple[Argument, ...]:
    """Row strides in elements; a multiple of 16 keeps every row 16-byte aligned and provably so."""
    return tuple(Argument(f"{name}_stride", "i32", 16) for name in names)


_EPS = Argument("eps", "fp32")
# Column tiles a row may be cut into.
_MAX_PARTS = 3
_NORM_MODULATE_OPTIONS = ("PART_A", "PART_B", "PART_C", "ROWS", "LOOP", "EARLY", "STREAM")
_NORM_MODULATE_TUNINGS = (  # registers a thread with Triton 3.6, sm_90a, D = 5,376: programs an SM holds
    Tuning(0, 8),  # 40: 6
    Tuning(0, 4),  # 72: 7
    Tuning(0, 8, is_streamed=True),  # 40: 6
    Tuning(0, 8, is_split=True),  # 56: 4
    Tuning(0, 4, is_split=True),  # 68: 7
    Tuning(0, 8, 48, is_split=True),  # 48: 5
    Tuning(0, 8, is_split=True, is_early=True),  # 63: 4
    Tuning(0, 16, is_split=True, rows=2),  # 52: 2, of two rows each
    Tuning(0, 8, loop=4),  # 80: 3, of two rows each
    Tuning(0, 8, loop=4, is_streamed=True),  # 80: 3
    Tuning(0, 8, loop=8),  # 80: 3
)
_ROW_TUNINGS = (Tuning(0, 8), Tuning(0, 4), Tuning(0, 16), Tuning(0, 4, 64))

_ALL = (
    Operator(
        "rms_norm",
        (*_pointers("x", "weight", "out"), *_strides("x", "out"), _EPS),
        ("D", "ROUND_FIRST"),
        "rows",
        _ROW_TUNINGS,
    ),
    Operator(
        "norm_modulate",
        (
            *_pointers("x", "weight", "shift", "scale"),
            *_index("index"),
            *_pointers("out"),
            *_strides("x", "table", "out"),
            Argument("rows", "i32"),
            _EPS,
        ),
        ("D",),
        "rows",
        _NORM_MODULATE_TUNINGS,
        options=_NORM_MODULATE_OPTIONS,
    ),
    Operator(
        "final_norm_modulate",
        (
            *_pointers("x", "weight", "shift", "scale"),
            *_index("rows", "index"),
            Argument("out_ptr", "*fp32", 16),
            *_strides("x", "table", "out"),
            _EPS,
        ),
        ("D",),
        "rows",
        _ROW_TUNINGS,
    ),
    Operator(
        "gate_residual",
        (
            *_pointers("residual", "update", "gate"),
            *_index("index"),
            *_pointers("out"),
            *_strides("residual", "update", "gate", "out"),
        ),
        ("D",),
        "rows",
        _ROW_TUNINGS,
    ),
    Operator(
        "gate_norm_modulate",
        (
            *_pointers("residual", "update", "gate", "weight", "shift", "scale"),
            *_index("index"),
            *_pointers("sum", "out"),
            *_strides("residual", "update", "gate", "table", "sum", "out"),
            _EPS,
        ),
        ("D",),
        "rows",
        _ROW_TUNINGS,
    ),
    Operator(
        "qk_norm_rope",
        (
            *_pointers("in", "out", "q_weight", "k_weight", "cos", "sin"),
            *_strides("in", "out", "angle"),
            *(Argument(name, "i32") for name in ("q_heads", "heads", "tiles")),
            _EPS,
        ),
        ("K", "HALF", "ROUND_FIRST"),
        "rows x tiles",
        (Tuning(32, 4), Tuning(64, 8), Tuning(64, 4), Tuning(16, 4), Tuning(32, 8), Tuning(8, 1)),
    ),
    Operator(
        "swiglu",
        (
            *_pointers("up", "gate", "out"),
            *_strides("in", "out"),
            Argument("width", "i32", 16),
            Argument("tiles", "i32"),
        ),
        (),
        "rows x tiles",
        (Tuning(2048, 4), Tuning(1024, 4), Tuning(2048, 8), Tuning(4096, 8), Tuning(1024, 2), Tuning(512, 2)),
    ),
    Operator(
        "decoder_qk_norm_rope",
        (
            *_half("in", "out"),
            *_single("cos", "sin"),
            *_strides("in", "out"),
            Argument("angle_stride", "i32"),
            *(Argument(name, "i32") for name in ("tokens", "heads", "tiles")),
            _EPS,
        ),
        ("K", "HALF"),
        "rows x tiles",
        (Tuning(64, 4), Tuning(32, 4), Tuning(64, 8), Tuning(16, 4)),
        helpers=(),
    ),
    Operator(
        "decoder_residual_norm",
        (
            *_single("residual"),
            *_half("update"),
            *_single("scale", "weight"),
            *_half("out"),
            *_strides("residual", "update", "out"),
            _EPS,
        ),
        ("D",),
        "rows",
        (Tuning(0, 4), Tuning(0, 8), Tuning(0, 2)),
        helpers=(),
    ),
    Operator(
        "decoder_swiglu",
        (*_half("in", "out"), *_strides("in", "out"), Argument("width", "i32", 16), Argument("tiles", "i32")),
        (),
        "rows x tiles",
        (Tuning(2048, 4), Tuning(1024, 4), Tuning(2048, 8), Tuning(4096, 8)),
        helpers=("swiglu", "rounding"),
    ),
)
OPERATORS: Mapping[str, Operator] = {operator.name: operator for operator in _ALL}

# Architecture -> operator -> index into its tunings that ships; 0 where nothing stands here. Set from a run of
# `scripts.bench.fused_operators --tune OPERATOR` on that architecture, at the row count that matters there.
SHIPPED: Mapping[str, Mapping[str, int]] = {"sm_90a": {}, "sm_100a": {}, "sm_120a": {}}


@dataclass(frozen=True)
class ModelSizes:
    """The sizes that kernels are compiled for. Row counts, head counts and feed-forward widths stay run-time values.

    hidden, head_dim, rotary_dim: the DiT (and refiner). encoder_*: the text encoder; its rotation is full width.
    decoder_*: the video decoder, fp16; 0: none.
    """

    hidden: int
    head_dim: int
    rotary_dim: int
    encoder_hidden: int
    encoder_head_dim: int
    decoder_width: int = 0
    decoder_head_dim: int = 0
    decoder_rotary_dim: int = 0


MINIMAX_H3 = ModelSizes(
    hidden=5376,
    head_dim=128,
    rotary_dim=96,
    encoder_hidden=5120,
    encoder_head_dim=128,
    decoder_width=2048,
    decoder_head_dim=64,
    decoder_rotary_dim=48,
)


def specialisations(
    sizes: ModelSizes, tuning: int | None = None, architecture: str = "sm_90a"
) -> tuple[Specialisation, ...]:
    """Every kernel of one model, without duplicates. Sizes that the kernels cannot do are left to the eager path.

    Args:
        tuning: index into each operator's `tunings`, the last one where it has fewer; None: what ships for `architecture`.
    """
    dit, encoder = sizes.hidden, sizes.encoder_hidden
    wanted: list[tuple[str, dict[str, int]]] = [("swiglu", {})]
    if _row_fits(dit):
        wanted += [
            (name, {"D": dit})
            for name in ("norm_modulate", "gate_norm_modulate", "gate_residual", "final_norm_modulate")
        ]
        wanted.append(("rms_norm", {"D": dit, "ROUND_FIRST": 0}))
    if _row_fits(encoder):
        wanted.append(("rms_norm", {"D": encoder, "ROUND_FIRST": 1}))
    if _head_fits(sizes.head_dim, sizes.rotary_dim):
        for half in (0, sizes.rotary_dim // 2):  # 0: the refiner does not rotate
            wanted.append(("qk_norm_rope", {"K": sizes.head_dim, "HALF": half, "ROUND_FIRST": 0}))
    if _head_fits(sizes.encoder_head_dim, sizes.encoder_head_dim):
        key = {"K": sizes.encoder_head_dim, "HALF": sizes.encoder_head_dim // 2, "ROUND_FIRST": 1}
        wanted.append(("qk_norm_rope", key))
    wanted += _decoder(sizes)
    shipped = SHIPPED[architecture]
    built = [
        _specialise(OPERATORS[name], constants, shipped.get(name, 0) if tuning is None else tuning)
        for name, constants in wanted
    ]
    return tuple({item.key(): item for item in built}.values())


def _decoder(sizes: ModelSizes) -> list[tuple[str, dict[str, int]]]:
    width, head, rotary = sizes.decoder_width, sizes.decoder_head_dim, sizes.decoder_rotary_dim
    if not width or not _row_fits(width):
        return []
    wanted: list[tuple[str, dict[str, int]]] = [
        ("decoder_swiglu", {}),
        ("decoder_residual_norm", {"D": width}),
    ]
    if head >= 32 and head & (head - 1) == 0 and rotary % 2 == 0 and 0 < rotary <= head:
        wanted.append(("decoder_qk_norm_rope", {"K": head, "HALF": rotary // 2}))
    return wanted


def _row_fits(width: int) -> bool:
    return width % 16 == 0 and width <= MAX_ROW


def _head_fits(head_dim: int, rotary_dim: int) -> bool:
    """Head width a power of two, halves of the rotation whole 16-byte vectors."""
    return (
        head_dim >= 32 and head_dim & (head_dim - 1) == 0 and rotary_dim % 16 == 0 and rotary_dim <= head_dim
    )


def _specialise(operator: Operator, constants: Mapping[str, int], tuning: int) -> Specialisation:
    chosen = operator.tunings[min(tuning, len(operator.tunings) - 1)]
    block = chosen.block or 1 << (constants["D"] - 1).bit_length()
    options = _options(chosen, constants["D"]) if operator.options else {}
    return Specialisation(
        operator,
        dict(constants),
        block,
        chosen.num_warps,
        chosen.max_registers,
        chosen.rows * chosen.loop,
        options,
    )


def _options(tuning: Tuning, width: int) -> dict[str, int]:
    """Values of `_NORM_MODULATE_OPTIONS`. A width that is no sum of three powers of two is one padded tile."""
    parts = [1 << bit for bit in reversed(range(width.bit_length())) if width >> bit & 1]
    if not tuning.is_split or len(parts) > _MAX_PARTS:
        parts = []
    values = (
        *(parts + [0] * _MAX_PARTS)[:_MAX_PARTS],
        tuning.rows,
        tuning.loop,
        int(tuning.is_early),
        int(tuning.is_streamed),
    )
    return dict(zip(_NORM_MODULATE_OPTIONS, values, strict=True))


def num_tunings() -> int:
    """How many values of `tuning` give different sets."""
    return max(len(operator.tunings) for operator in _ALL)


def source_sha256(operator: Operator) -> str:
    """SHA-256 over the Triton sources a cubin of `operator` comes from: its own file and its helpers, in order."""
    return hash_sources(path.read_bytes() for path in operator.sources())


def hash_sources(texts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text)
    return digest.hexdigest()


def architecture_of(capability: Sequence[int]) -> str:
    """The target name of a device: (9, 0) -> "sm_90a". The name may not be one of `ARCHITECTURES`."""
    major, minor = capability
    return f"sm_{major}{minor}a"


def row_tiles(width: int, block: int) -> int:
    """Programs a row under the "rows x tiles" rule."""
    return -(-width // block)
