"""Adapter changes row by row: the sum is exact, the rounding happens once, whatever the pieces."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.header import read_header
from prepare.checkpoint import SourceTensor
from prepare.merge import Delta, LowRank, Span, apply_updates, from_float64, to_float64
from prepare.repack import SourceReader
from tests.prepare.lora_files import write_adapter

MIDDLE = st.integers(0x0080, 0x7F00)  # positive normal bfloat16 bit patterns, far from infinity


def _bfloat16(bits: int) -> float:
    return float(np.array([bits << 16], np.uint32).view(np.float32)[0])


@given(MIDDLE, st.sampled_from([0, 1, -1]), st.booleans())
def test_bfloat16_is_rounded_once_even_beside_a_tie(bits: int, nudge: int, negative: bool) -> None:
    """A nudge of one float64 step beside a tie vanishes in float32; rounding twice would then go to even."""
    low, high = _bfloat16(bits), _bfloat16(bits + 1)
    tie = (low + high) / 2
    value = float(np.nextafter(tie, np.inf * nudge)) if nudge else tie
    expected = bits + (bits & 1 if nudge == 0 else int(nudge > 0))
    sign = 0x8000 if negative else 0
    found = np.frombuffer(from_float64(np.array([-value if negative else value]), "BF16"), np.uint16)[0]
    assert found == expected | sign


@given(st.floats(-1e30, 1e30))
def test_bfloat16_is_a_nearest_value(value: float) -> None:
    bits = int(np.frombuffer(from_float64(np.array([value]), "BF16"), np.uint16)[0])
    distance = abs(Fraction(_bfloat16(bits)) - Fraction(value))
    around = [bits - 1, bits + 1] if bits & 0x7FFF else [1, 0x8001]
    assert all(distance <= abs(Fraction(_bfloat16(other)) - Fraction(value)) for other in around)


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("F32", torch.float32), ("F16", torch.float16)])
def test_other_types_are_rounded_as_torch_rounds(dtype: str, torch_dtype: torch.dtype) -> None:
    values = (
        torch.randn(4096, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).float().double()
    )
    found = torch.frombuffer(bytearray(from_float64(values.numpy(), dtype)), dtype=torch_dtype)
    assert torch.equal(found, values.to(torch_dtype))


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.bfloat16, "BF16"), (torch.float16, "F16"), (torch.float32, "F32")]
)
def test_stored_values_are_read_exactly(dtype: torch.dtype, name: str) -> None:
    values = torch.randn(999, generator=torch.Generator().manual_seed(1)).to(dtype)
    data = memoryview(values.view(torch.uint8).numpy().tobytes())
    assert torch.equal(torch.from_numpy(to_float64(data, name)), values.double())


def _stored(path: Path) -> dict[str, SourceTensor]:
    header = read_header(path)
    return {
        entry.name: SourceTensor(
            path, entry.dtype, entry.shape, header.data_start + entry.begin, entry.num_bytes
        )
        for entry in header.tensors
    }


SHAPES = {"up": (40, 3), "down": (3, 8), "delta": (40, 8)}


@pytest.fixture(scope="module")
def factors(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[str, torch.Tensor], dict[str, SourceTensor]]:
    """Random tensors, and where they are stored."""
    generator = torch.Generator().manual_seed(2)
    tensors = {name: torch.randn(*shape, generator=generator) for name, shape in SHAPES.items()}
    return tensors, _stored(write_adapter(tmp_path_factory.mktemp("a") / "a.safetensors", tensors))


@settings(max_examples=25, deadline=None)
@given(
    first=st.integers(0, 20),
    count=st.integers(1, 20),
    columns=st.one_of(st.none(), st.tuples(st.integers(0, 3), st.integers(4, 8))),
    data=st.data(),
)
def test_any_piece_gets_its_own_rows_of_the_change(
    first: int,
    count: int,
    columns: tuple[int, int] | None,
    data: st.DataObject,
    factors: tuple[dict[str, torch.Tensor], dict[str, SourceTensor]],
) -> None:
    """Spans of 10 rows each, in any order, as heads of an interleaved matrix are."""
    (up, down, delta), stored = factors[0].values(), factors[1]
    order = data.draw(st.permutations(range(4)))
    spans = tuple(Span(10 * place, 10 * place + 10, 10 * source) for place, source in enumerate(order))
    whole = 0.5 * (up.double() @ down.double()) - 2.0 * delta.double()
    expected = torch.cat([whole[10 * source : 10 * source + 10] for source in order])
    width = slice(*columns) if columns else slice(None)
    values = np.zeros((count, 8))[:, width].copy()
    with SourceReader({}) as reader:
        updates = (LowRank(stored["up"], stored["down"], 0.5, spans), Delta(stored["delta"], -2.0, spans))
        apply_updates(values, first, updates, reader, columns)
    torch.testing.assert_close(
        torch.from_numpy(values), expected[first : first + count][:, width], rtol=1e-13, atol=1e-13
    )  # float64 sums of three products
