"""What numerical code runs on: the device, its attention backends and its fused operators. No torch at the top."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from loader.errors import CapabilityError, InternalError

if TYPE_CHECKING:
    from kernels.cubin import KernelSet
    from kernels.ops import Operators
    from runtime.ops.attention import Attention


@dataclass(frozen=True)
class Compute:
    """Chosen once per start, handed to every job.

    Attributes:
        device: `cpu` or `cuda`.
        attention: for the denoiser's long sequences.
        short_attention: for the conditioner and the refiner, whose length differs with every prompt: a backend
            without a plan per length.
        operators: fused operators; None runs the eager composition, which is the reference.
        facts: what else was chosen and why; `report` has all of it.
    """

    device: str
    attention: Attention
    short_attention: Attention
    operators: Operators | None = None
    facts: dict[str, object] = field(default_factory=dict)

    def report(self) -> dict[str, object]:
        """What was chosen and why, for the timeline. Ask again after the warm-up: a first call may change the backend."""
        choice = getattr(self.attention, "choice", None)
        return self.facts if choice is None else {"attention": str(choice), **self.facts}

    def warm_attention(self, rows: int, heads: int, head_dim: int) -> None:
        """Build the attention plan of the denoiser's sequence on this thread, where torch keeps it."""
        import torch

        from kernels.attention import DenseAttention, warm_up

        if isinstance(self.attention, DenseAttention):
            warm_up(
                self.attention,
                num_rows=rows,
                num_heads=heads,
                head_dim=head_dim,
                device=torch.device(self.device),
                dtype=torch.bfloat16,
            )


def open_early(directory: Path, kernels: Sequence[Mapping[str, object]]) -> KernelSet | None:
    """The compiled operators for device 0, opened without torch and without a context; None if that is impossible here.

    Arguments as in `choose_compute`, which then finds out why. Raises: ArtifactError: a file is not what the manifest says.
    """
    from kernels.cubin import open_kernels
    from runtime.native_driver import NativeDriver

    try:
        driver = NativeDriver()
        return open_kernels(directory / "kernels", kernels, driver.capability(), driver)
    except (CapabilityError, InternalError):
        return None


def choose_compute(
    device: str,
    directory: Path,
    kernels: Sequence[Mapping[str, object]],
    attention_backend: str = "auto",
    opened: KernelSet | None = None,
) -> Compute:
    """Backends of this device; needs torch.

    Args:
        directory: prepared directory. kernels: the manifest's list, of any architectures.
        attention_backend: of the denoiser on a GPU, see `kernels.attention.choose_backend`.
        opened: those kernels, from `open_early`.
    Raises: ArtifactError: a kernel file is not what the manifest says. CapabilityError: no such backend here.
    """
    import torch

    from runtime.ops.attention import attention

    if device != "cuda":
        return Compute(device, attention, attention)
    from kernels.attention import AttentionChoice, DenseAttention, choose_backend
    from kernels.cubin import open_kernels
    from kernels.ops import Operators

    kernel_set = opened
    if kernel_set is None:
        kernel_set = open_kernels(directory / "kernels", kernels, torch.cuda.get_device_capability())
    torch.cuda.synchronize()  # binding needs the context, current in this thread
    kernel_set.bind()
    choice = choose_backend(torch.device(device), torch.bfloat16, attention_backend)
    short = AttentionChoice("flash", "no plan per length", rest=("efficient", "math"))
    found = f"{len(kernel_set)} precompiled for {kernel_set.architecture}"
    return Compute(
        device,
        DenseAttention(choice),
        DenseAttention(short),
        Operators(kernel_set),
        {"operators": kernel_set.note or found},
    )
