"""Everything that touches torch: views of arenas, state dictionaries, assignment into modules.

torch is imported inside functions only; the import is the longest step of a start and must not be waited for here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from loader.errors import ArtifactError

if TYPE_CHECKING:
    import torch
    from torch import Tensor as Tensor
    from torch.nn import Module as Module

    from loader.load_plan import PlanTensor

_TORCH_NAMES: Mapping[str, str] = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a safetensors dtype name."""
    import torch

    dtype: torch.dtype = getattr(torch, _TORCH_NAMES[name])
    return dtype


def byte_tensor(exposed: object, device: str) -> Tensor:
    """[bytes] uint8 over an arena, no copy. `exposed`: a buffer, or an object with `__cuda_array_interface__`."""
    import torch

    if hasattr(exposed, "__cuda_array_interface__"):
        return torch.as_tensor(exposed, device=device)
    return torch.frombuffer(exposed, dtype=torch.uint8)


def tensor_view(arena: Tensor, tensor: PlanTensor) -> Tensor:
    """A typed view of [bytes] uint8 arena memory."""
    part = arena[tensor.arena_offset : tensor.arena_offset + tensor.bytes]
    return part.view(torch_dtype(tensor.dtype)).view(tensor.shape)


def tensor_from_bytes(data: bytes, dtype: str, shape: tuple[int, ...], device: str) -> Tensor:
    """A tensor with memory of its own."""
    import torch

    if not data:
        return torch.empty(shape, dtype=torch_dtype(dtype), device=device)
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8).view(torch_dtype(dtype)).view(shape).to(device)
    )


def current_stream(ordinal: int) -> int:
    """Handle of the calling thread's current stream on a CUDA device."""
    import torch

    return int(torch.cuda.current_stream(ordinal).cuda_stream)


def assign(
    module: Module,
    tensors: Mapping[str, Tensor],
    strict: bool = True,
    rename: Callable[[str], str] | None = None,
) -> None:
    """Give a module's parameters and buffers (built on the meta device) these tensors, without copies.

    Args:
        rename: name of a tensor → name in the module.
        strict: refuse names that are missing or left over.
    Raises: ArtifactError: lists every name that is missing, left over, wrong in shape or dtype, or that several tensors
        are renamed to; nothing is assigned.
    """
    import torch

    sources: dict[str, list[str]] = {}
    for name in tensors:
        sources.setdefault(rename(name) if rename else name, []).append(name)
    offered = {name: tensors[names[0]] for name, names in sources.items()}
    wanted = dict(module.state_dict(keep_vars=True))
    problems = [f"{name} is {' and '.join(names)}" for name, names in sources.items() if len(names) > 1]
    if strict:
        problems += [f"missing {name}" for name in wanted if name not in offered]
        problems += [f"left over {name}" for name in offered if name not in wanted]
    for name in sorted(wanted.keys() & offered.keys()):
        have, want = offered[name], wanted[name]
        if have.shape != want.shape or have.dtype != want.dtype:
            problems.append(
                f"{name} is {have.dtype} {list(have.shape)} instead of {want.dtype} {list(want.shape)}"
            )
    if problems:
        shown = "; ".join(problems[:20])
        raise ArtifactError(
            "tensors do not fit the module", where=type(module).__name__, found=f"{len(problems)}: {shown}"
        )
    for name in wanted.keys() & offered.keys():
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        if isinstance(wanted[name], torch.nn.Parameter):
            setattr(owner, leaf, torch.nn.Parameter(offered[name], requires_grad=False))
        else:
            owner._buffers[leaf] = offered[name]
