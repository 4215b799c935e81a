"""Dense attention against a float64 softmax, and the choice of a backend."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from kernels.attention import AttentionChoice, DenseAttention, backends, choose_backend, warm_up
from loader.errors import CapabilityError, InternalError

CPU = torch.device("cpu")


def exact(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    repeat = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(repeat, 1), v.double().repeat_interleave(repeat, 1)
    scores = torch.einsum("shk,thk->hst", q, k) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
    return torch.einsum("hst,thk->shk", scores.softmax(-1), v)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (4, 2)])
def test_attention_is_softmax_of_scores(causal: bool, scale: float | None, heads: int, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(heads)
    rows, head_dim = 13, 16
    buffer = torch.randn(rows, heads + 2 * kv_heads, head_dim, generator=generator)
    q, k, v = buffer[:, :heads], buffer[:, heads : heads + kv_heads], buffer[:, heads + kv_heads :]
    attention = DenseAttention(choose_backend(CPU, torch.float32))
    out = attention(q, k, v, causal=causal, scale=scale)
    assert out.shape == q.shape
    expected = exact(q, k, v, causal, head_dim**-0.5 if scale is None else scale)
    torch.testing.assert_close(
        out.double(), expected, rtol=1e-5, atol=1e-6
    )  # float32 sums of 16 and 13 terms


def test_operands_that_disagree_are_shown() -> None:
    attention = DenseAttention(AttentionChoice("math", "test"))
    q, k = torch.zeros(4, 3, 8), torch.zeros(4, 2, 8)
    with pytest.raises(InternalError, match=r"q, k, v: .*\[4, 3, 8\], \[4, 2, 8\], \[4, 2, 8\]"):
        attention(q, k, k)


def test_cpu_gets_the_exact_form_and_says_why() -> None:
    assert choose_backend(CPU, torch.float32) == AttentionChoice("math", "device is cpu", rest=("flash",))


@pytest.mark.parametrize("name", ["cudnn", "efficient"])
def test_requested_backend_is_not_replaced(name: str) -> None:
    with pytest.raises(CapabilityError, match=f"'{name}' is unavailable: device is cpu"):
        choose_backend(CPU, torch.bfloat16, name)


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(CapabilityError, match=r"found 'fa4'; allowed: \['auto', 'cudnn', 'flash'"):
        choose_backend(CPU, torch.bfloat16, "fa4")


def test_warm_up_calls_with_the_strides_of_the_model() -> None:
    seen: list[tuple[int, ...]] = []

    class Recording(DenseAttention):
        def __call__(
            self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None
        ) -> Tensor:
            seen.extend(x.stride() for x in (q, k, v))
            return super().__call__(q, k, v, causal=causal, scale=scale)

    attention = Recording(choose_backend(CPU, torch.float32))
    warm_up(attention, num_rows=5, num_heads=2, head_dim=8, device=CPU, dtype=torch.float32)
    assert seen == [(48, 8, 1)] * 3


def test_threads_do_not_take_each_others_backend() -> None:
    """torch keeps the choice for the whole process."""
    cuda = torch.backends.cuda
    mixed: list[tuple[bool, bool]] = []

    def choose(backend: SDPBackend, expected: tuple[bool, bool]) -> None:
        for _ in range(200):
            with backends([backend]):
                for _ in range(5):
                    found = (cuda.flash_sdp_enabled(), cuda.math_sdp_enabled())  # type: ignore[no-untyped-call]
                    if found != expected:
                        mixed.append(found)
                    time.sleep(0)

    threads = [
        threading.Thread(target=choose, args=args)
        for args in ((SDPBackend.FLASH_ATTENTION, (True, False)), (SDPBackend.MATH, (False, True)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert mixed == []
