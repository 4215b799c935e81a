"""Call sites of the operators: a precompiled kernel where one is loaded for this device and fits, else eager torch.

`Operators` is an object that model code is given, like its attention callable; nothing here is global. Shapes are
checked on every path. A kernel and the eager form agree bit for bit except for the order of the sum in a norm and
the last bits of exp, which move single results by one bf16 step.

Symbols: S rows, N picked rows, R table rows, D hidden, H query heads, G key heads, K head dim, F feed-forward width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import reference
from kernels.catalog import row_tiles
from kernels.cubin import Kernel, KernelSet
from loader.errors import InternalError


class Operators:
    """The fused operators on one device.

    Args:
        kernels: bound kernels of this device (`kernels.cubin`); None or an empty set: eager everywhere.
    Attributes:
        fallbacks: operator → why a CUDA call of it ran eagerly, first reason only; for the timeline.
    """

    def __init__(self, kernels: KernelSet | None = None) -> None:
        self._kernels = kernels if kernels is not None and len(kernels) else None
        self._note = (kernels.note if kernels is not None else None) or "no kernels were given"
        self.fallbacks: dict[str, str] = {}

    @property
    def kernels(self) -> KernelSet | None:
        """What was given, for operators of other modules; None: nothing to run."""
        return self._kernels

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, round_before_weight: bool = False) -> Tensor:
        """RMSNorm over the last axis: [S, D] x [D] -> [S, D], new memory.

        Rounding: once, after the weight (the DiT), or also before it (`round_before_weight`, the text encoder).
        """
        _check_rows("x", x, None, None)
        _check_vector("weight", weight, x.shape[1])
        kernel = self._find("rms_norm", (x.shape[1], int(round_before_weight)), (x, weight))
        if kernel is None:
            return reference.rms_norm(x, weight, eps, round_before_weight=round_before_weight)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        kernel.launch(
            len(x),
            _stream(x),
            x.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            x.stride(0),
            out.stride(0),
            eps,
        )
        return out

    def norm_modulate(
        self, x: Tensor, weight: Tensor, shift: Tensor, scale: Tensor, index: Tensor, eps: float
    ) -> Tensor:
        """`rms_norm(x) * (1 + scale[index]) + shift[index]`: [S, D], new memory.

        Args:
            x: [S, D].
            weight: [D].
            shift, scale: [R, D], views of one table: equal row strides, for instance `table[:, SHIFT_ATTN]`.
            index: [S] int32, row of the table; out of range is undefined on CUDA, IndexError on the CPU.
        Rounding: after the weight, 1 + scale, the product and the sum.
        """
        _check_rows("x", x, None, None)
        _check_vector("weight", weight, x.shape[1])
        _check_table(shift, scale, x.shape[1])
        _check_index("index", index, len(x))
        kernel = self._find("norm_modulate", (x.shape[1],), (x, weight, shift, scale), (index,))
        if kernel is None:
            return reference.norm_modulate(x, weight, shift, scale, index, eps)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        kernel.launch(
            -(-len(x) // kernel.rows),
            _stream(x),
            x.data_ptr(),
            weight.data_ptr(),
            shift.data_ptr(),
            scale.data_ptr(),
            index.data_ptr(),
            out.data_ptr(),
            x.stride(0),
            shift.stride(0),
            out.stride(0),
            len(x),
            eps,
        )
        return out

    def gate_residual(self, residual: Tensor, update: Tensor, gate: Tensor, index: Tensor) -> Tensor:
        """`residual + gate[index] * update`: [S, D], new memory. gate [R, D], index [S] int32. Two roundings."""
        _check_rows("residual", residual, None, None)
        _check_rows("update", update, *residual.shape)
        _check_rows("gate", gate, None, residual.shape[1])
        _check_index("index", index, len(residual))
        kernel = self._find("gate_residual", (residual.shape[1],), (residual, update, gate), (index,))
        if kernel is None:
            return reference.gate_residual(residual, update, gate, index)
        out = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
        kernel.launch(
            len(residual),
            _stream(residual),
            residual.data_ptr(),
            update.data_ptr(),
            gate.data_ptr(),
            index.data_ptr(),
            out.data_ptr(),
            residual.stride(0),
            update.stride(0),
            gate.stride(0),
            out.stride(0),
        )
        return out

    def gate_norm_modulate(
        self,
        residual: Tensor,
        update: Tensor,
        gate: Tensor,
        weight: Tensor,
        shift: Tensor,
        scale: Tensor,
        index: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """`gate_residual`, then `norm_modulate` of its rounded result: both, each [S, D], new memory.

        gate may come from another table than shift and scale (the next block's norm); all are [R, D] with one index.
        """
        _check_rows("residual", residual, None, None)
        _check_rows("update", update, *residual.shape)
        _check_vector("weight", weight, residual.shape[1])
        _check_rows("gate", gate, None, residual.shape[1])
        _check_table(shift, scale, residual.shape[1])
        _check_index("index", index, len(residual))
        operands = (residual, update, gate, weight, shift, scale)
        kernel = self._find("gate_norm_modulate", (residual.shape[1],), operands, (index,))
        if kernel is None:
            return reference.gate_norm_modulate(residual, update, gate, weight, shift, scale, index, eps)
        total = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
        out = torch.empty_like(total)
        kernel.launch(
            len(residual),
            _stream(residual),
            *(operand.data_ptr() for operand in operands),
            index.data_ptr(),
            total.data_ptr(),
            out.data_ptr(),
            residual.stride(0),
            update.stride(0),
            gate.stride(0),
            shift.stride(0),
            total.stride(0),
            out.stride(0),
            eps,
        )
        return total, out

    def final_norm_modulate(
        self, x: Tensor, weight: Tensor, shift: Tensor, scale: Tensor, rows: Tensor, index: Tensor, eps: float
    ) -> Tensor:
        """`norm_modulate` of the rows that leave the model, cast for the float32 heads: [N, D] float32, new memory.

        Args:
            x: [S, D], the packed sequence.
            shift, scale: [R, D], R target kinds, equal row strides, for instance `final[:, FINAL_SHIFT]`.
            rows: [N] int32, which rows of `x`. index: [N] int32, target kind of each.
        """
        _check_rows("x", x, None, None)
        _check_vector("weight", weight, x.shape[1])
        _check_table(shift, scale, x.shape[1])
        _check_index("rows", rows, None)
        _check_index("index", index, len(rows))
        operands = (x, weight, shift, scale)
        kernel = self._find("final_norm_modulate", (x.shape[1],), operands, (rows, index))
        if kernel is None:
            return reference.final_norm_modulate(x, weight, shift, scale, rows, index, eps)
        out = torch.empty(len(rows), x.shape[1], dtype=torch.float32, device=x.device)
        kernel.launch(
            len(rows),
            _stream(x),
            *(operand.data_ptr() for operand in operands),
            rows.data_ptr(),
            index.data_ptr(),
            out.data_ptr(),
            x.stride(0),
            shift.stride(0),
            out.stride(0),
            eps,
        )
        return out

    def qk_norm_rope(
        self,
        qkv: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        num_heads: int,
        num_kv_heads: int,
        eps: float,
        *,
        round_before_weight: bool = False,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Norm q and k per head and rotate them, ready for attention: q [S, H, K], k [S, G, K], v [S, G, K].

        Args:
            qkv: [S, (H + 2 G) K], rows q heads, k heads, v heads. Without `out` the kernel works in place: do not
                use `qkv` afterwards, q, k and v may be views of it or not.
            q_weight, k_weight: [K].
            cos, sin: [S, r], dtype of `qkv` (rounded first): channel j < r turns with channel j + r, the
                channels from 2 r on pass through. None: no rotation.
            out: [S, (H + G) K]; q and k go there, `qkv` keeps its values.
        Rounding: the norm (see `rms_norm`), each product and each sum.
        """
        head_dim = len(q_weight)
        _check_rows("qkv", qkv, None, (num_heads + 2 * num_kv_heads) * head_dim)
        _check_vector("k_weight", k_weight, head_dim)
        half = _check_rotation(cos, sin, len(qkv), head_dim)
        if out is not None:
            _check_rows("out", out, len(qkv), (num_heads + num_kv_heads) * head_dim)
        target = qkv if out is None else out
        # without rotation any address will do for the tables; the kernel does not read them
        cosines, sines = (q_weight[None], q_weight[None]) if cos is None or sin is None else (cos, sin)
        operands = (qkv, target, q_weight, k_weight, cosines, sines)
        kernel = self._find("qk_norm_rope", (head_dim, half, int(round_before_weight)), operands)
        if kernel is None:
            return reference.qk_norm_rope(
                qkv,
                q_weight,
                k_weight,
                cos,
                sin,
                num_heads,
                num_kv_heads,
                eps,
                round_before_weight=round_before_weight,
                out=out,
            )
        tiles = row_tiles(num_heads, kernel.block) + row_tiles(num_kv_heads, kernel.block)
        kernel.launch(
            len(qkv) * tiles,
            _stream(qkv),
            *(operand.data_ptr() for operand in operands),
            qkv.stride(0),
            target.stride(0),
            cosines.stride(0),
            num_heads,
            num_heads + num_kv_heads,
            tiles,
            eps,
        )
        normed = num_heads + num_kv_heads
        qk = target[:, : normed * head_dim].view(len(qkv), normed, head_dim)
        v = qkv[:, normed * head_dim :].view(len(qkv), num_kv_heads, head_dim)
        return qk[:, :num_heads], qk[:, num_heads:], v

    def swiglu(self, buffer: Tensor, *, gate_first: bool = False, in_place: bool = False) -> Tensor:
        """`up * silu(gate)` of [S, 2 F]: [S, F].

        Args:
            buffer: [up; gate] (the DiT), or [gate; up] with `gate_first` (the text encoder).
            in_place: the result may be the first half of `buffer`, a view with its row stride; saves S F elements.
        Rounding: silu and the product.
        """
        _check_rows("buffer", buffer, None, None)
        if buffer.shape[1] % 2:
            raise _wrong("buffer", buffer, "[S, 2 F]")
        width = buffer.shape[1] // 2
        first, second = buffer[:, :width], buffer[:, width:]
        up, gate = (second, first) if gate_first else (first, second)
        kernel = self._find("swiglu", (), (up, gate))
        if kernel is None:
            return reference.swiglu(buffer, gate_first=gate_first, in_place=in_place)
        out = first if in_place else torch.empty_like(first, memory_format=torch.contiguous_format)
        tiles = row_tiles(width, kernel.block)
        kernel.launch(
            len(buffer) * tiles,
            _stream(buffer),
            up.data_ptr(),
            gate.data_ptr(),
            out.data_ptr(),
            buffer.stride(0),
            out.stride(0),
            width,
            tiles,
        )
        return out

    def _find(
        self,
        operator: str,
        constants: tuple[int, ...],
        operands: tuple[Tensor, ...],
        indices: tuple[Tensor, ...] = (),
    ) -> Kernel | None:
        """The kernel for these operands, or None and, where one was to be expected, the reason in `fallbacks`."""
        device_type = operands[0].device.type
        if self._kernels is None:
            if device_type == "cuda":
                self.fallbacks.setdefault(operator, self._note)
            return None
        if device_type != self._kernels.device_type:
            return None
        kernel = self._kernels.find(operator, *constants)
        reason = _unsuitable(operands, indices)
        if kernel is None:
            reason = f"no kernel for {constants} on {self._kernels.architecture}"
        if reason is not None:
            self.fallbacks.setdefault(operator, reason)
            return None
        return kernel


def _stream(tensor: Tensor) -> int:
    """torch's current stream as the driver's handle; 0 where the device has none."""
    if not tensor.is_cuda:
        return 0
    return int(torch.cuda.current_stream(tensor.device).cuda_stream)


def _unsuitable(operands: tuple[Tensor, ...], indices: tuple[Tensor, ...]) -> str | None:
    """Why a kernel cannot take these tensors: it reads bf16 in 16-byte vectors at row strides of 32 bytes."""
    for position, tensor in enumerate(operands):
        if tensor.dtype != torch.bfloat16:
            return f"operand {position} is {tensor.dtype}"
        if tensor.data_ptr() % 16 or tensor.stride(-1) != 1 or (tensor.ndim > 1 and tensor.stride(0) % 16):
            return f"operand {position} is not aligned: strides {tensor.stride()}"
    for tensor in indices:
        if not tensor.is_contiguous():
            return "index is not contiguous"
    return None


def _check_rows(name: str, tensor: Tensor, rows: int | None, width: int | None) -> None:
    if tensor.ndim != 2 or rows not in (None, tensor.shape[0]) or width not in (None, tensor.shape[1]):
        raise _wrong(
            name, tensor, f"[{'any' if rows is None else rows}, {'any' if width is None else width}]"
        )


def _check_vector(name: str, tensor: Tensor, width: int) -> None:
    if tensor.shape != (width,):
        raise _wrong(name, tensor, f"[{width}]")


def _check_table(shift: Tensor, scale: Tensor, width: int) -> None:
    _check_rows("shift", shift, None, width)
    if scale.shape != shift.shape or scale.stride() != shift.stride():
        raise _wrong("scale", scale, f"as shift: {list(shift.shape)}, strides {shift.stride()}")


def _check_index(name: str, index: Tensor, rows: int | None) -> None:
    if index.ndim != 1 or rows not in (None, len(index)) or index.dtype != torch.int32:
        raise _wrong(name, index, f"[{'any' if rows is None else rows}] int32")


def _check_rotation(cos: Tensor | None, sin: Tensor | None, rows: int, head_dim: int) -> int:
    """Pairs that turn; 0 without tables."""
    if cos is None or sin is None:
        if cos is not sin:
            raise InternalError("cos and sin come together or not at all", where="qk_norm_rope")
        return 0
    _check_rows("cos", cos, rows, None)
    if sin.shape != cos.shape or sin.stride() != cos.stride():
        raise _wrong("sin", sin, f"as cos: {list(cos.shape)}, strides {cos.stride()}")
    if 2 * cos.shape[1] > head_dim:
        raise _wrong("cos", cos, f"[{rows}, up to {head_dim // 2}]")
    return cos.shape[1]


def _wrong(name: str, tensor: Tensor, expected: str) -> InternalError:
    found = f"{list(tensor.shape)} {tensor.dtype}, strides {tensor.stride()}"
    return InternalError("operand has the wrong shape", where=name, found=found, expected=expected)
