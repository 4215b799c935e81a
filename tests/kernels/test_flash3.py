"""The optional FlashAttention-3 backend, over a stand-in of its extension with the shipped operator's exact schema."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import flash3
from kernels.attention import AttentionChoice, DenseAttention, choose_backend, warm_up
from loader.errors import CapabilityError
from runtime.ops.tile_attention import TileAttention

# As the extension of fa3-fwd 0.0.3 registers it.
SCHEMA = (
    "fwd(Tensor q,Tensor k,Tensor v,Tensor(k_new!)? k_new = None,Tensor(v_new!)? v_new = None,Tensor? q_v = None,"
    "Tensor(out!)? out = None,Tensor? cu_seqlens_q = None,Tensor? cu_seqlens_k = None,Tensor? cu_seqlens_k_new = None,"
    "Tensor? seqused_q = None,Tensor? seqused_k = None,int? max_seqlen_q = None,int? max_seqlen_k = None,"
    "Tensor? page_table = None,Tensor? kv_batch_idx = None,Tensor? leftpad_k = None,Tensor? rotary_cos = None,"
    "Tensor? rotary_sin = None,Tensor? seqlens_rotary = None,Tensor? q_descale = None,Tensor? k_descale = None,"
    "Tensor? v_descale = None,float? softmax_scale = None,bool is_causal = False,int window_size_left = -1,"
    "int window_size_right = -1,int attention_chunk = 0,float softcap = 0.0,bool is_rotary_interleaved = False,"
    "Tensor? scheduler_metadata = None,int num_splits = 0,bool? pack_gqa = None,int sm_margin = 0) "
    "-> (Tensor(out!), Tensor, Tensor, Tensor)"
)
EXTENSION = f"""
import torch
library = torch.library.Library("fa3_fwd", "DEF")
library.define({SCHEMA!r})
calls = []

def fwd(q, k, v, *rest, **options):
    scale, is_causal, splits = rest[20], rest[21], rest[28]
    calls.append((q.stride(), scale, is_causal, splits))
    repeat = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)
    empty = torch.empty(0)
    return out.transpose(1, 2).to(torch.bfloat16).contiguous(), empty, empty, empty

library.impl("fwd", fwd, "CPU")
"""


def failing(statement: str) -> str:
    """The stand-in with a statement before each call's work."""
    return EXTENSION.replace("    calls.append", f"    {statement}\n    calls.append")


CUDA = torch.device("cuda")
MATH = AttentionChoice("math", "torch's own")
AUTO = AttentionChoice("flash3", "test", otherwise=MATH)

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a package on the path, without an `__init__.py` like the published ones."""

    def write(source: str, package: str = "fa3_fwd") -> None:
        (tmp_path / package).mkdir()
        (tmp_path / package / "_C.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)

    yield write
    for package in flash3.PACKAGES:
        for name in (f"{package}._C", package):
            library = getattr(sys.modules.pop(name, None), "library", None)
            if library is not None:
                library._destroy()


@pytest.fixture
def device_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], None]:
    """A CUDA device of this capability with cuDNN 9.19, as far as choosing looks."""

    def pretend(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)

    return pretend


@pytest.fixture
def extension(install: Install) -> Any:
    """The stand-in, loaded by the code under test."""
    install(EXTENSION)
    flash3.load()
    return sys.modules["fa3_fwd._C"]


def operands(heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of one projection, as the block hands them over."""
    generator = torch.Generator().manual_seed(heads)
    buffer = torch.randn(13, heads + 2 * kv_heads, 16, generator=generator).bfloat16()
    return buffer[:, :heads], buffer[:, heads : heads + kv_heads], buffer[:, heads + kv_heads :]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (4, 2)])
@pytest.mark.parametrize("choice", [AttentionChoice("flash3", "test"), AUTO], ids=["named", "auto"])
def test_backend_is_attention(
    choice: AttentionChoice, causal: bool, scale: float | None, heads: int, kv_heads: int, extension: Any
) -> None:
    q, k, v = operands(heads, kv_heads)
    found = DenseAttention(choice)(q, k, v, causal=causal, scale=scale)
    expected = DenseAttention(MATH)(q.double(), k.double(), v.double(), causal=causal, scale=scale)
    assert found.shape == q.shape
    assert torch.equal(found, expected.to(torch.bfloat16))  # both in float64, rounded once
    assert found.flatten(1).data_ptr() == found.data_ptr()  # joining the heads copies nothing
    strides, *arguments = extension.calls[-1]
    assert strides[1:] == q.stride()
    assert arguments == [scale, causal, 1]


def test_nothing_is_loaded_before_the_warm_up(
    install: Install, device_of: Callable[[tuple[int, int]], None]
) -> None:
    install(EXTENSION)
    device_of((9, 0))
    choice = choose_backend(CUDA, torch.bfloat16)
    attention = DenseAttention(choice)
    assert (choice.backend, choice.of_torch.backend) == ("flash3", "cudnn")
    assert str(choice) == "flash3: package fa3_fwd"
    assert "fa3_fwd._C" not in sys.modules
    warm_up(attention, num_rows=5, num_heads=2, head_dim=8, device=torch.device("cpu"), dtype=torch.bfloat16)
    assert sys.modules["fa3_fwd._C"].calls == [((240, 48, 8, 1), None, False, 1)]  # the strides of the model
    assert attention.choice == choice


@pytest.mark.parametrize(
    ("capability", "dtype", "expected"),
    [
        ((9, 0), torch.bfloat16, "cudnn: cuDNN 91900; not flash3: none of the packages fa3_fwd, flash_attn_3 is installed"),
        ((9, 0), torch.float16, "cudnn: cuDNN 91900; not flash3: dtype is torch.float16"),
        ((10, 0), torch.bfloat16, "cudnn: cuDNN 91900; not flash3: device is not sm_90"),
        ((8, 9), torch.bfloat16, "flash: device is older than sm_90; not flash3: device is not sm_90"),
    ],
    ids=["no-package", "float16", "sm_100", "sm_89"],
)  # fmt: skip
def test_elsewhere_auto_chooses_as_before_and_says_why(
    capability: tuple[int, int],
    dtype: torch.dtype,
    expected: str,
    device_of: Callable[[tuple[int, int]], None],
) -> None:
    device_of(capability)
    assert str(choose_backend(CUDA, dtype)) == expected


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise ImportError('libcudart.so.99: cannot open')", "cannot be loaded"),
        ("", "cannot be loaded"),
        (EXTENSION.replace("softmax_scale", "scale"), "another form"),
        (failing("raise RuntimeError('no head dim 16 here')"), "no head dim 16"),
    ],
    ids=["wrong-library", "registers-nothing", "other-form", "refuses-the-shape"],
)  # fmt: skip
def test_package_that_fails_its_first_call_leaves_its_place_to_torch(
    source: str, message: str, install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install(source)
    attention, given = DenseAttention(AUTO), operands(3, 3)
    with caplog.at_level(logging.WARNING):
        found = [attention(*given), attention(*given)]
    assert all(torch.equal(out, DenseAttention(MATH)(*given)) for out in found)
    assert attention.choice.backend == "math"
    assert attention.choice.reason.startswith("torch's own; not flash3: ")
    assert message in attention.choice.reason
    assert len(caplog.records) == 1  # it is not tried again
    with pytest.raises((CapabilityError, RuntimeError), match=message):
        DenseAttention(AttentionChoice("flash3", "requested"))(*given)


def test_backend_does_not_change_after_the_first_call(install: Install) -> None:
    install(failing("if calls: raise RuntimeError('device lost')"))
    attention, given = DenseAttention(AUTO), operands(3, 3)
    attention(*given)
    with pytest.raises(RuntimeError, match="device lost"):
        attention(*given)
    assert attention.choice == AUTO


def test_lack_of_memory_is_no_reason_to_change(install: Install) -> None:
    install(failing("raise torch.OutOfMemoryError('full')"))
    attention = DenseAttention(AUTO)
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        attention(*operands(3, 3))
    assert attention.choice == AUTO


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 16), (torch.bfloat16, 12)])
def test_operands_it_is_not_compiled_for_go_to_torch(
    dtype: torch.dtype, head_dim: int, extension: Any
) -> None:
    given = torch.randn(7, 3, 2, head_dim, generator=torch.Generator().manual_seed(1)).to(dtype).unbind(1)
    attention = DenseAttention(AUTO)
    assert torch.equal(attention(*given), DenseAttention(MATH)(*given))
    assert extension.calls == []
    assert attention.choice == AUTO


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tiles_keep_cudnn(
    dtype: torch.dtype, install: Install, device_of: Callable[[tuple[int, int]], None]
) -> None:
    install(EXTENSION)
    device_of((9, 0))
    assert TileAttention(CUDA, dtype).backend == "cudnn"


def test_nothing_is_loaded_to_say_why_it_cannot_run() -> None:
    assert flash3.obstacle(torch.device("cpu"), torch.bfloat16) == "device is cpu"
    with pytest.raises(CapabilityError, match="'flash3' is unavailable: device is cpu"):
        choose_backend(torch.device("cpu"), torch.bfloat16, "flash3")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, r"FlashAttention-3 is not installed; allowed: \(.fa3_fwd., .flash_attn_3.\)"),
        ("raise ImportError('libcudart.so.99: cannot open')", r"flash_attn_3: .*cannot be loaded.*libcudart\.so\.99"),
        ("", "flash_attn_3: .*cannot be loaded"),
        (
            "import torch\nlibrary = torch.library.Library('flash_attn_3', 'DEF')\nlibrary.define('fwd(Tensor q, Tensor k, Tensor v) -> Tensor')",
            "flash_attn_3: .*another form.*softmax_scale",
        ),
    ],
    ids=["absent", "wrong-library", "registers-nothing", "other-form"],
)  # fmt: skip
def test_package_that_does_not_serve_is_refused_by_name(
    source: str | None, message: str, install: Install
) -> None:
    if source is not None:
        install(source, "flash_attn_3")
    with pytest.raises(CapabilityError, match=message):
        flash3.load()
