"""The fused block against the eager one, block by block and over whole evaluations, and what it must not do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.catalog import ModelSizes
from kernels.ops import Operators
from runtime.families.minimax_h3.config import TransformerConfig
from runtime.families.minimax_h3.model.block import BlockWeights
from runtime.families.minimax_h3.model.fused_block import FusedBlock
from runtime.families.minimax_h3.model.pending import Hidden, PendingSum, settled
from runtime.families.minimax_h3.model.transformer import block_forward
from runtime.ops.attention import attention
from runtime.ops.rotary import RotaryTable

CONFIG = TransformerConfig(
    num_attention_heads=2,
    attention_head_dim=32,
    hidden_size=80,
    num_layers=3,
    num_refiner_layers=0,
    ffn_dim=96,
    in_channels=4,
    audio_in_channels=8,
    patch_size=(1, 2, 2),
    text_dim=40,
    freq_dim=16,
    time_embed_hidden_dim=48,
    time_embed_dim=24,
    rope_freq_dim=4,
)
KINDS, PAIRS = 4, 16  # every channel of a head turns: rows of the table are then aligned


class Case:
    """A stack of random blocks over packed rows."""

    def __init__(self, seed: int, dtype: torch.dtype, rows: int = 13) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        c = CONFIG
        A, D, F = c.num_attention_heads * c.attention_head_dim, c.hidden_size, c.ffn_dim
        shapes = ((D,), (3 * A, D), (c.attention_head_dim,), (c.attention_head_dim,), (D, A), (D,), (2 * F, D), (D, F))  # fmt: skip
        self.weights = [
            BlockWeights(*(self.random(*shape, scale=0.15, offset=len(shape) == 1) for shape in shapes))
            for _ in range(c.num_layers)
        ]
        self.modulation = self.random(c.num_layers, KINDS, 6, D, scale=0.3)
        self.index = torch.randint(0, KINDS, (rows,), generator=self.generator, dtype=torch.int32)
        angles = torch.rand(rows, PAIRS, generator=self.generator) * 6
        self.rope = RotaryTable(angles.cos(), angles.sin()).to(dtype)
        self.x = self.random(rows, D)

    def random(self, *shape: int, scale: float = 1.0, offset: bool = False) -> Tensor:
        return (float(offset) + scale * torch.randn(*shape, generator=self.generator)).to(self.dtype)

    def run(self, block: Any) -> list[Tensor]:
        """Rows after each block."""
        x: Hidden = self.x
        rows = []
        for i, w in enumerate(self.weights):
            x = block(x, w, self.modulation[i], self.index, self.rope, attention, CONFIG)
            rows.append(settled(x))
        return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("seed", range(4))
def test_stack_without_kernels_equals_the_eager_blocks_bit_for_bit(seed: int, dtype: torch.dtype) -> None:
    case = Case(seed, dtype)
    for found, expected in zip(case.run(FusedBlock(Operators())), case.run(block_forward), strict=True):
        assert expected.abs().max() > 1
        assert torch.equal(found, expected)


def test_eager_block_takes_what_a_fused_one_leaves() -> None:
    """A stack may mix the two forms."""
    case = Case(7, torch.bfloat16)
    fused, calls = FusedBlock(Operators()), []

    def mixed(x: Hidden, *arguments: Any) -> Hidden:
        calls.append(type(x))
        return (fused if len(calls) != 2 else block_forward)(x, *arguments)

    for found, expected in zip(case.run(mixed), case.run(block_forward), strict=True):
        assert torch.equal(found, expected)
    assert calls == [Tensor, PendingSum, Tensor]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("seed", range(2))
def test_kernels_stay_within_roundings_of_the_eager_blocks(seed: int, tmp_path: Path) -> None:
    """A norm's sum in another order flips single bf16 roundings (2^-8 of the value); three blocks spread them."""
    from tests.kernels.interpreter import fake_kernels

    sizes = ModelSizes(hidden=80, head_dim=32, rotary_dim=2 * PAIRS, encoder_hidden=48, encoder_head_dim=32)
    kernels, driver = fake_kernels(tmp_path, sizes)
    operators = Operators(kernels)
    case = Case(seed, torch.bfloat16, rows=5)
    found, expected = case.run(FusedBlock(operators)), case.run(block_forward)
    for mine, reference in zip(found, expected, strict=True):
        assert (mine - reference).abs().max() <= 2**-6 * reference.abs().max()
        assert (mine != reference).float().mean() < 0.2
    launched = [name for name, _, _ in driver.launches]
    per_block = ["qk_norm_rope", "gate_norm_modulate", "swiglu"]
    between = ["gate_residual", "gate_norm_modulate"]  # `run` looks at the rows after each block
    assert launched == [
        "norm_modulate",
        *per_block,
        *between,
        *per_block,
        *between,
        *per_block,
        "gate_residual",
    ]
    assert operators.fallbacks == {}


class Recorder(TorchDispatchMode):
    """Names of operators that read or write memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").partition(".")[0]
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not is_view and name not in ("empty", "empty_like", "empty_strided", "new_empty"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


class SilentKernels:
    """A `KernelSet` whose kernels do nothing, so that the only torch operators are the block's own."""

    device_type, architecture, note = "cpu", "sm_90a", None

    def __init__(self) -> None:
        self.found: list[str] = []
        self.block, self.rows = 32, 1

    def __len__(self) -> int:
        return 1

    def find(self, operator: str, *constants: int) -> SilentKernels:
        self.found.append(operator)
        return self

    def launch(self, *values: int | float) -> None: ...


def test_block_runs_four_products_one_attention_and_nothing_else() -> None:
    """No hidden copy: whatever is not a product, attention or one of our kernels would show here."""
    case, kernels, recorder = Case(3, torch.bfloat16, rows=5), SilentKernels(), Recorder()
    strides: list[tuple[int, ...]] = []

    def watched(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """In place of attention: a result in the layout of cuDNN's, rows outermost."""
        strides.extend((q.stride(), k.stride(), v.stride()))
        recorder.names.append("attention")
        return torch.empty(q.shape, dtype=q.dtype)

    block = FusedBlock(Operators(kernels))  # type: ignore[arg-type]
    with torch.inference_mode():
        given = block(case.x, case.weights[0], case.modulation[0], case.index, case.rope, watched, CONFIG)
        recorder.names.clear()
        kernels.found.clear()
        with recorder:
            block(given, case.weights[1], case.modulation[1], case.index, case.rope, watched, CONFIG)
    assert recorder.names == ["linear", "attention", "linear", "linear", "linear"]
    assert kernels.found == ["gate_norm_modulate", "qk_norm_rope", "gate_norm_modulate", "swiglu"]
    assert strides == [(192, 32, 1)] * 6  # views of the projection, as the warm-up builds the plan for


def test_cudnn_gives_rows_outermost_for_views_of_the_projection() -> None:
    """torch allocates cuDNN's result like the query: dense, its order of strides kept, so joining heads is a view."""
    q = torch.empty(11, 6, 32)[:, :2]  # [S, H, K] of [S, 3 H, K]
    out = torch.empty_like(q.transpose(0, 1)[None])[0].transpose(0, 1)
    assert out.flatten(1).data_ptr() == out.data_ptr()
    assert out.is_contiguous()
