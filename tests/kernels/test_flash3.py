"""The optional FlashAttention-3 backend, over a stand-in of its extension with the shipped operator's exact schema."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import flash3
from kernels.attention import AttentionChoice, DenseAttention, choose_backend
from loader.errors import CapabilityError

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


@pytest.fixture(scope="class")
def extension(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The stand-in, loaded by the code under test; without an `__init__.py`, like the package."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "fa3_fwd").mkdir()
    (folder / "fa3_fwd" / "_C.py").write_text(EXTENSION)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        flash3.load()
        yield sys.modules["fa3_fwd._C"]
        sys.modules["fa3_fwd._C"].library._destroy()
        for name in ("fa3_fwd._C", "fa3_fwd"):
            del sys.modules[name]


def operands(heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of one projection, as the block hands them over."""
    generator = torch.Generator().manual_seed(heads)
    buffer = torch.randn(13, heads + 2 * kv_heads, 16, generator=generator).bfloat16()
    return buffer[:, :heads], buffer[:, heads : heads + kv_heads], buffer[:, heads + kv_heads :]


class TestWithTheExtension:
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("scale", [None, 0.3])
    @pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (4, 2)])
    def test_backend_is_attention(
        self, causal: bool, scale: float | None, heads: int, kv_heads: int, extension: Any
    ) -> None:
        q, k, v = operands(heads, kv_heads)
        found = DenseAttention(AttentionChoice("flash3", "test"))(q, k, v, causal=causal, scale=scale)
        expected = DenseAttention(AttentionChoice("math", "test"))(
            q.double(), k.double(), v.double(), causal=causal, scale=scale
        )
        assert found.shape == q.shape
        assert torch.equal(found, expected.to(torch.bfloat16))  # both in float64, rounded once
        assert found.flatten(1).data_ptr() == found.data_ptr()  # joining the heads copies nothing
        strides, *arguments = extension.calls[-1]
        assert strides[1:] == q.stride()
        assert arguments == [scale, causal, 1]


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
    ],
    ids=["absent", "wrong-library", "registers-nothing"],
)  # fmt: skip
def test_package_that_does_not_serve_is_refused_by_name(
    source: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if source is not None:
        (tmp_path / "flash_attn_3").mkdir()
        (tmp_path / "flash_attn_3" / "_C.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CapabilityError, match=message):
        flash3.load()
    for name in ("flash_attn_3._C", "flash_attn_3"):
        sys.modules.pop(name, None)


def test_operator_of_another_form_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn_3").mkdir()
    (tmp_path / "flash_attn_3" / "_C.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    library = torch.library.Library("flash_attn_3", "DEF")
    library.define("fwd(Tensor q, Tensor k, Tensor v) -> Tensor")
    try:
        with pytest.raises(CapabilityError, match=r"flash_attn_3: .*another form.*softmax_scale"):
            flash3.load()
    finally:
        library._destroy()
        for name in ("flash_attn_3._C", "flash_attn_3"):
            sys.modules.pop(name, None)
