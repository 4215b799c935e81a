"""Dense attention over one packed sequence: one signature, several backends, and the warm-up that a cold start needs.

On an H200 FlashAttention-3 runs the 56 x 128 heads at 674 TFLOP/s, cuDNN at 574 and torch's flash backend at 363
(`results/warm_step.json`; a step takes 2.24 s with the first and 2.47 s with the second). FlashAttention-3 is a package
of its own: where it is missing, or fails its first call, cuDNN takes its place. It has no plan per shape; its first call
loads the extension and its kernels. cuDNN compiles a plan for every new (shape, strides) when it first meets it; torch keeps the plans per
*thread* and cannot store them. Measured on an H200 at 22,519 rows: 0.79 s for the first call of a process, 0.06 s for
each new length, 0.09 s in another thread, 0.023 s afterwards. The weights of a cold start take over three seconds, so
`warm_up` on the denoising thread, with the strides the model will use, while they stream takes all of it off the
path to the first step. A plan built ahead (0.01 s to load, one shape and one exact cuDNN version each, corrupted ones
accepted silently) could save no more than that hidden time, hence none are kept here.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kernels import flash3
from loader.errors import CapabilityError, InternalError

log = logging.getLogger(__name__)

BackendName = Literal["cudnn", "flash", "efficient", "math", "flash3"]

# torch's own; flash3 is a library beside it
_BACKENDS: dict[BackendName, SDPBackend] = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


_SELECTION = threading.Lock()


@contextmanager
def backends(order: Sequence[SDPBackend]) -> Iterator[None]:
    """Ask these backends, in this order, for the calls inside. One thread at a time: torch's choice is the process's.

    Two threads that choose at once would take each other's backend: at a start the conditioner and the attention plan
    are warmed beside each other.
    """
    with _SELECTION, sdpa_kernel(list(order), set_priority=True):
        yield


@dataclass(frozen=True)
class AttentionChoice:
    """Which backend runs and why; for the timeline.

    Attributes:
        rest: what torch may fall to for calls the first refuses.
        otherwise: torch's backend for what flash3 does not take, and in its place if it fails; None if it was named.
    """

    backend: BackendName
    reason: str
    rest: tuple[BackendName, ...] = ()
    otherwise: AttentionChoice | None = None

    def __str__(self) -> str:
        return f"{self.backend}: {self.reason}"

    @property
    def of_torch(self) -> AttentionChoice:
        """The choice among torch's own backends."""
        return self.otherwise or self

    def without_flash3(self, why: str) -> AttentionChoice:
        return dataclasses.replace(self.of_torch, reason=f"{self.of_torch.reason}; not flash3: {why}")


class DenseAttention:
    """softmax(scale * q k^T) v, over all rows or (`causal`) over rows up to one's own, with a chosen backend.

    `choice` is what runs; it changes if FlashAttention-3 fails the first call, with the reason and a warning in the log.
    """

    def __init__(self, choice: AttentionChoice) -> None:
        self.choice = choice
        self._flash3: flash3.Forward | None = None
        own = choice.of_torch
        self._order = [_BACKENDS[name] for name in (own.backend, *own.rest) if name in _BACKENDS]

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None
    ) -> Tensor:
        """[S, H, K] x [S, G, K] x [S, G, K] -> [S, H, K], dtype of `q`; strided views are read as they are.

        G divides H: query head h reads key head h * G // H. `scale` defaults to 1 / sqrt(K).
        Raises: InternalError: sizes disagree (names both). CapabilityError: flash3 was named and cannot be loaded.
        """
        _check(q, k, v)
        if self.choice.backend == "flash3" and (self.choice.otherwise is None or flash3.takes(q)):
            found = self._by_flash3(q, k, v, causal, scale)
            if found is not None:
                return found
        with backends(self._order):
            out = scaled_dot_product_attention(
                q.transpose(0, 1)[None],  # each [1, H or G, S, K]
                k.transpose(0, 1)[None],
                v.transpose(0, 1)[None],
                is_causal=causal,
                scale=scale,
                enable_gqa=k.shape[1] != q.shape[1],
            )
        return out[0].transpose(0, 1)

    def _by_flash3(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor | None:
        """[S, H, K]. None: the first call failed and torch's backend has taken over; later failures are errors."""
        try:
            forward = self._flash3 or flash3.load()
            # [1, S, H or G, K] each; one split: S is long enough to fill the device
            out: Tensor = forward(
                q[None], k[None], v[None], softmax_scale=scale, is_causal=causal, num_splits=1
            )[0][0]
        except torch.OutOfMemoryError:
            raise
        except (CapabilityError, RuntimeError) as error:
            if self._flash3 is not None or self.choice.otherwise is None:
                raise
            self.choice = self.choice.without_flash3(str(error))
            log.warning("attention runs without FlashAttention-3", extra={"reason": self.choice.reason})
            return None
        self._flash3 = forward
        return out


def choose_backend(device: torch.device, dtype: torch.dtype, requested: str = "auto") -> AttentionChoice:
    """The backend for `device`; loads nothing.

    On CUDA in bfloat16 FlashAttention-3, where a package of it is installed and the device is an sm_90; else cuDNN in half
    precision where torch has it, else flash. On the CPU math.

    Args:
        requested: "auto" or a name of `BackendName`; a name is taken alone, without anything to fall to.
    Raises: CapabilityError: unknown name, or one that this device or dtype cannot run.
    """
    names: tuple[BackendName, ...] = (*_BACKENDS, "flash3")
    if requested not in ("auto", *names):
        raise CapabilityError("unknown attention backend", found=repr(requested), expected=["auto", *names])
    if requested != "auto":
        name: BackendName = next(item for item in names if item == requested)
        why = _requested_obstacle(name, device, dtype)
        if why is not None:
            raise CapabilityError(f"attention backend {name!r} is unavailable: {why}", hint="use 'auto'")
        return AttentionChoice(name, "requested")
    if device.type != "cuda":
        return AttentionChoice("math", f"device is {device.type}", rest=("flash",))
    own = _choice_of_torch(device, dtype)
    obstacle = flash3.obstacle(device, dtype)
    if obstacle is not None:
        return own.without_flash3(obstacle)
    return AttentionChoice("flash3", f"package {flash3.installed()}", otherwise=own)


def _choice_of_torch(device: torch.device, dtype: torch.dtype) -> AttentionChoice:
    """Of torch's own backends on CUDA."""
    obstacle = _cudnn_obstacle(device, dtype)
    if obstacle is not None:
        return AttentionChoice("flash", obstacle, rest=("efficient", "math"))
    version = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return AttentionChoice("cudnn", f"cuDNN {version}", rest=("flash", "efficient", "math"))


def warm_up(
    attention: DenseAttention,
    *,
    num_rows: int,
    num_heads: int,
    head_dim: int,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """One call with the shape and strides of the DiT: q, k, v as views of a fused [S, 3 H K] buffer.

    It builds cuDNN's plan, or loads FlashAttention-3 and its kernels, so that no later call does.

    Call it on the thread that will denoise; needs 4 S H K elements of device memory, returned to torch's allocator.
    Blocks until the device is done, so that the time is seen here and not in the first step.
    """
    buffer = torch.zeros(num_rows, 3 * num_heads * head_dim, device=device, dtype=dtype)
    attention(*buffer.view(num_rows, 3, num_heads, head_dim).unbind(1))
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _requested_obstacle(name: BackendName, device: torch.device, dtype: torch.dtype) -> str | None:
    if name == "cudnn":
        return _cudnn_obstacle(device, dtype)
    if name == "flash3":
        return flash3.obstacle(device, dtype)
    return f"device is {device.type}" if name == "efficient" and device.type != "cuda" else None


def _cudnn_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why cuDNN attention cannot run, or None."""
    if device.type != "cuda":
        return f"device is {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"dtype is {dtype}"
    if not torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
        return "this torch has no cuDNN"
    if not torch.backends.cuda.cudnn_sdp_enabled():  # type: ignore[no-untyped-call]
        return "torch's cuDNN attention is switched off"
    if torch.cuda.get_device_capability(device) < (9, 0):
        return "device is older than sm_90"
    return None


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    fits = q.ndim == k.ndim == 3 and k.shape == v.shape and q.shape[2] == k.shape[2]
    if not fits or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise InternalError(
            "attention operands disagree",
            where="q, k, v",
            found=[list(x.shape) for x in (q, k, v)],
            expected="[S, H, K], [S, G, K], [S, G, K] with G dividing H",
        )
