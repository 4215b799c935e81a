"""Kernels in Triton's interpreter, through the call sites, against the eager form and against float64.

Bit equality is asked where no sum is involved. In a norm the order of the sum may move rstd by an ulp of float32,
which flips a bf16 rounding about once in 10^4 elements; `assert_same` allows one bf16 step in one element of 500.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.catalog import OPERATORS, ModelSizes
from kernels.ops import Operators
from loader.errors import InternalError

pytestmark = pytest.mark.usefixtures("interpreted")

SIZES = ModelSizes(hidden=80, head_dim=32, rotary_dim=16, encoder_hidden=48, encoder_head_dim=32)
EPS = 1e-5
# bf16 keeps 8 significant bits: half a step is 2^-9 relative; up to five roundings, sums that cancel.
FLOAT64_TOLERANCE = {"rtol": 2**-6, "atol": 2**-6}


@pytest.fixture
def fused(request: pytest.FixtureRequest, tmp_path: Path, interpreted: None) -> Operators:
    """Operators over the interpreter; parametrized indirectly by the tuning where tiles matter."""
    from tests.kernels.interpreter import fake_kernels

    kernels, _ = fake_kernels(tmp_path, SIZES, getattr(request, "param", 0))
    return Operators(kernels)


def random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator).bfloat16()


def strided(generator: torch.Generator, rows: int, width: int) -> Tensor:
    """Rows with a gap between them, 16-byte aligned: what a view of a wider buffer looks like."""
    return random(generator, rows, width + 16)[:, :width]


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    different = actual != expected
    assert int(different.sum()) <= actual.numel() / 500
    torch.testing.assert_close(actual[different].float(), expected[different].float(), rtol=2**-7, atol=2**-9)


@pytest.fixture(params=[1, 5])
def rows(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def generator(rows: int) -> torch.Generator:
    return torch.Generator().manual_seed(rows)


def indices(generator: torch.Generator, rows: int, entries: int) -> Tensor:
    return torch.randint(0, entries, (rows,), generator=generator, dtype=torch.int32)


@pytest.mark.parametrize(("width", "round_first"), [(80, False), (48, True)])
def test_rms_norm(
    fused: Operators, generator: torch.Generator, rows: int, width: int, round_first: bool
) -> None:
    x, weight = strided(generator, rows, width), random(generator, width)
    actual = fused.rms_norm(x, weight, EPS, round_before_weight=round_first)
    assert_same(actual, reference.rms_norm(x, weight, EPS, round_before_weight=round_first))
    exact = reference.rms_norm(x.double(), weight.double(), EPS)
    torch.testing.assert_close(actual.double(), exact, **FLOAT64_TOLERANCE)
    assert fused.fallbacks == {}


NORM_MODULATE_TUNINGS = range(len(OPERATORS["norm_modulate"].tunings))


@pytest.mark.parametrize("fused", NORM_MODULATE_TUNINGS, indirect=True)
def test_norm_modulate(fused: Operators, generator: torch.Generator, rows: int) -> None:
    x, weight, table = strided(generator, rows, 80), random(generator, 80), random(generator, 4, 6, 80)
    index = indices(generator, rows, 4)
    actual = fused.norm_modulate(x, weight, table[:, 3], table[:, 4], index, EPS)
    assert_same(actual, reference.norm_modulate(x, weight, table[:, 3], table[:, 4], index, EPS))
    exact = reference.norm_modulate(*(t.double() for t in (x, weight, table[:, 3], table[:, 4])), index, EPS)
    torch.testing.assert_close(actual.double(), exact, **FLOAT64_TOLERANCE)
    assert fused.fallbacks == {}


@pytest.mark.parametrize("fused", NORM_MODULATE_TUNINGS, indirect=True)
def test_norm_modulate_writes_its_rows_and_no_others(fused: Operators, generator: torch.Generator) -> None:
    """Five rows in memory for seven: programs of two rows must not touch the sixth."""
    assert fused.kernels is not None
    kernel = fused.kernels.find("norm_modulate", 80)
    assert kernel is not None
    x, table = random(generator, 7, 80), random(generator, 4, 2, 80)
    weight, index = random(generator, 80), indices(generator, 5, 4)
    out = torch.full((7, 80), torch.nan, dtype=torch.bfloat16)
    addresses = [tensor.data_ptr() for tensor in (x, weight, table[:, 0], table[:, 1], index, out)]
    kernel.launch(-(-5 // kernel.rows), 0, *addresses, 80, 160, 80, 5, EPS)
    assert_same(out[:5], reference.norm_modulate(x[:5], weight, table[:, 0], table[:, 1], index, EPS))
    assert out[5:].isnan().all()


def test_gate_residual_is_bit_equal(fused: Operators, generator: torch.Generator, rows: int) -> None:
    residual, update, table = (
        strided(generator, rows, 80),
        random(generator, rows, 80),
        random(generator, 3, 6, 80),
    )
    index = indices(generator, rows, 3)
    actual = fused.gate_residual(residual, update, table[:, 2], index)
    assert torch.equal(actual, reference.gate_residual(residual, update, table[:, 2], index))
    exact = reference.gate_residual(residual.double(), update.double(), table[:, 2].double(), index)
    torch.testing.assert_close(actual.double(), exact, **FLOAT64_TOLERANCE)
    assert fused.fallbacks == {}


def test_gate_norm_modulate(fused: Operators, generator: torch.Generator, rows: int) -> None:
    residual, update, weight = (
        random(generator, rows, 80),
        strided(generator, rows, 80),
        random(generator, 80),
    )
    here, after = random(generator, 4, 6, 80), random(generator, 4, 7, 80)  # two tables, two row strides
    index = indices(generator, rows, 4)
    operands = (residual, update, here[:, 5], weight, after[:, 0], after[:, 1])
    total, actual = fused.gate_norm_modulate(*operands, index, EPS)
    expected_total, expected = reference.gate_norm_modulate(*operands, index, EPS)
    assert torch.equal(total, expected_total)
    assert_same(actual, expected)
    assert fused.fallbacks == {}


def test_final_norm_modulate(fused: Operators, generator: torch.Generator, rows: int) -> None:
    x, weight, table = random(generator, 9, 80), random(generator, 80), random(generator, 2, 2, 80)
    picked, index = indices(generator, rows, 9), indices(generator, rows, 2)
    actual = fused.final_norm_modulate(x, weight, table[:, 0], table[:, 1], picked, index, EPS)
    assert actual.dtype == torch.float32
    assert_same(
        actual, reference.final_norm_modulate(x, weight, table[:, 0], table[:, 1], picked, index, EPS)
    )
    assert fused.fallbacks == {}


def rotation(generator: torch.Generator, rows: int, half: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """cos and sin [rows, half] as views of 16-wide rows: strides must be multiples of 16 elements."""
    if half == 0:
        return None, None
    angles = torch.rand(rows, 16, generator=generator) * 6.28
    return angles.cos().bfloat16()[:, :half], angles.sin().bfloat16()[:, :half]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "half", "round_first"),
    [(3, 3, 8, False), (1, 1, 8, False), (9, 2, 16, True), (2, 2, 0, False)],
    ids=["dit", "one head", "encoder", "refiner"],
)
@pytest.mark.parametrize("fused", [5], indirect=True, ids=["tile 8"])
@pytest.mark.parametrize("separate", [False, True], ids=["in place", "new buffer"])
def test_qk_norm_rope(
    fused: Operators,
    generator: torch.Generator,
    rows: int,
    heads: int,
    kv_heads: int,
    half: int,
    round_first: bool,
    separate: bool,
) -> None:
    qkv = strided(generator, rows, (heads + 2 * kv_heads) * 32)
    q_weight, k_weight = random(generator, 32), random(generator, 32)
    tables = rotation(generator, rows, half)
    out = torch.full((rows, (heads + kv_heads) * 32), torch.nan).bfloat16() if separate else None
    arguments = (q_weight, k_weight, *tables, heads, kv_heads, EPS)
    expected = reference.qk_norm_rope(qkv, *arguments, round_before_weight=round_first)
    before = qkv.clone()
    q, k, v = fused.qk_norm_rope(qkv, *arguments, round_before_weight=round_first, out=out)
    assert_same(q, expected[0])
    assert_same(k, expected[1])
    assert torch.equal(v, before.view(rows, -1, 32)[:, heads + kv_heads :])
    if separate:
        assert torch.equal(qkv, before)
        assert out is not None
        assert q.data_ptr() == out.data_ptr()
    else:
        assert q.data_ptr() == qkv.data_ptr()
    assert fused.fallbacks == {}


@pytest.mark.parametrize("fused", [5], indirect=True, ids=["tile 512"])
@pytest.mark.parametrize(
    ("gate_first", "in_place", "width"),
    [(False, False, 1040), (False, True, 48), (True, False, 48), (True, True, 1040)],
)
def test_swiglu(
    fused: Operators, generator: torch.Generator, rows: int, gate_first: bool, in_place: bool, width: int
) -> None:
    buffer = 3 * random(generator, rows, 2 * width)
    expected = reference.swiglu(buffer, gate_first=gate_first)
    exact = reference.swiglu(buffer.double(), gate_first=gate_first)
    address = buffer.data_ptr()
    actual = fused.swiglu(buffer, gate_first=gate_first, in_place=in_place)
    assert (actual.data_ptr() == address) is in_place
    assert_same(actual, expected)
    torch.testing.assert_close(actual.double(), exact, **FLOAT64_TOLERANCE)
    assert fused.fallbacks == {}


def test_no_rows_launch_nothing(tmp_path: Path) -> None:
    from tests.kernels.interpreter import fake_kernels

    kernels, driver = fake_kernels(tmp_path, SIZES)
    out = Operators(kernels).rms_norm(torch.empty(0, 80).bfloat16(), torch.ones(80).bfloat16(), EPS)
    assert out.shape == (0, 80)
    assert driver.launches == []


def test_unsuitable_operands_run_eagerly_and_say_why(tmp_path: Path) -> None:
    from tests.kernels.interpreter import fake_kernels

    kernels, driver = fake_kernels(tmp_path, SIZES)
    operators = Operators(kernels)
    generator = torch.Generator().manual_seed(3)
    shifted = random(generator, 4, 97)[:, 1:81]  # odd row stride, two bytes off a 16-byte border
    weight = random(generator, 80)
    assert torch.equal(operators.rms_norm(shifted, weight, EPS), reference.rms_norm(shifted, weight, EPS))
    assert "not aligned" in operators.fallbacks["rms_norm"]
    wide = random(generator, 4, 96)
    table = random(generator, 3, 6, 96)
    index = indices(generator, 4, 3)
    assert torch.equal(
        operators.gate_residual(wide, wide, table[:, 2], index),
        reference.gate_residual(wide, wide, table[:, 2], index),
    )
    assert "no kernel for (96,)" in operators.fallbacks["gate_residual"]
    assert driver.launches == []


def test_zero_modulation_is_the_plain_norm(fused: Operators, generator: torch.Generator, rows: int) -> None:
    x, weight = random(generator, rows, 80), random(generator, 80)
    zeros, index = torch.zeros(3, 80).bfloat16(), indices(generator, rows, 3)
    assert torch.equal(
        fused.norm_modulate(x, weight, zeros, zeros, index, EPS), fused.rms_norm(x, weight, EPS)
    )
    assert torch.equal(fused.gate_residual(x, x, zeros, index), x)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"weight": torch.zeros(79)}, "weight"),
        ({"index": torch.zeros(4, dtype=torch.int64)}, "index"),
        ({"index": torch.zeros(3, dtype=torch.int32)}, "index"),
        ({"shift": torch.zeros(3, 79)}, "shift"),
        ({"scale": torch.zeros(3, 6, 80)[:, 1]}, "scale"),
        ({"x": torch.zeros(4, 1, 80)}, "x"),
    ],
)
def test_wrong_operands_are_named(change: dict[str, Tensor], name: str) -> None:
    operands = {
        "x": torch.zeros(4, 80),
        "weight": torch.zeros(80),
        "shift": torch.zeros(3, 80),
        "scale": torch.zeros(3, 80),
        "index": torch.zeros(4, dtype=torch.int32),
    }
    with pytest.raises(InternalError, match=f"^{name}:"):
        Operators().norm_modulate(**(operands | change), eps=EPS)


def test_without_kernels_everything_is_eager() -> None:
    operators = Operators()
    generator = torch.Generator().manual_seed(5)
    x, weight = torch.randn(3, 80, generator=generator), torch.randn(80, generator=generator)
    assert torch.equal(operators.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))
    assert operators.fallbacks == {}  # a CPU expects nothing else
