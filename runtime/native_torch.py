"""Operators of torch through the C interface of its libraries, before `import torch` has happened or while it does.

The libraries are mapped long before the import ends (`runtime.torch_preload`), their operators are registered when they
are mapped, and an operator here runs without the interpreter lock. Getting that back from a thread that imports takes up to
5 ms, so what only handles handles keeps it. What it is for: first uses that wait for the driver
(`runtime.native_warm_up`), never results. Uses the `aoti_torch_*` functions, whose signatures torch keeps.
Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from collections.abc import Iterator, Sequence

from loader.errors import CapabilityError
from runtime.torch_preload import TorchInstall

# ruff: noqa: PTH118 (pathlib is not imported on the cold path)

_NONE = 0  # of an optional argument
_QUICK = frozenset({
    "get_stride", "get_data_ptr", "_reinterpret_tensor", "new_tensor_handle", "delete_tensor_object",
})  # fmt: skip
"""Functions of a microsecond that never wait for the device, though one may wait for the allocator; also all constants."""

Handle = ctypes.c_void_p
"""An owned tensor; `NativeTorch.close` deletes it."""


class NativeTorch:
    """One thread's calls on one device, until `close`.

    Args:
        install: whose libraries are mapped. device: `cpu` or `cuda` (its device 0).
    Raises: CapabilityError: here or at a call: a library or a function is missing, or the call failed; names it.
    """

    def __init__(self, install: TorchInstall, device: str) -> None:
        names = ["libtorch_cpu.so"] if device == "cpu" else ["libtorch_cpu.so", "libtorch_cuda.so"]
        paths = [os.path.join(install.directory, "lib", name) for name in names]
        try:
            self._libraries = [ctypes.CDLL(path) for path in paths]
            self._locked = [ctypes.PyDLL(path) for path in paths]  # calls keep the interpreter lock
        except OSError as cause:
            raise CapabilityError(f"cannot be opened: {cause}", where="libtorch") from cause
        self._functions: dict[str, ctypes._NamedFuncPointer] = {}
        self.device = device
        self._device_type = self._constant(f"device_type_{device}")
        self._handles: list[Handle] = []

    def empty(self, *sizes: int, dtype: str = "bfloat16") -> Handle:
        """A contiguous tensor of undefined values."""
        out = Handle()
        count, lengths, strides = ctypes.c_int64(len(sizes)), _longs(sizes), _longs(_contiguous(sizes))
        place = (self._constant(f"dtype_{dtype}"), self._device_type, 0)
        self._call("empty_strided", count, lengths, strides, *place, ctypes.byref(out))
        return self._own(out)

    @contextlib.contextmanager
    def scratch(self) -> Iterator[None]:
        """Tensors made inside are given back at its end, as `close` does; a failure leaves them to `close`."""
        count = len(self._handles)
        yield
        made, self._handles = self._handles[count:], self._handles[:count]
        self._delete(made)

    def view(self, tensor: Handle, *sizes: int) -> Handle:
        """The first values of a tensor's memory as a contiguous tensor of other sizes."""
        return self._strided(tensor, sizes, _contiguous(sizes))

    def transposed(self, tensor: Handle, rows: int, columns: int) -> Handle:
        """[columns, rows] of a contiguous [rows, columns]."""
        return self._strided(tensor, (columns, rows), (1, columns))

    def heads(self, fused: Handle, rows: int, heads: int, width: int, offset: int) -> Handle:
        """[1, heads, rows, width] of the heads that begin at column `offset` of a contiguous [rows, …] tensor."""
        columns = ctypes.c_int64()
        self._call("get_stride", fused, ctypes.c_int64(0), ctypes.byref(columns))
        strides = (rows * columns.value, width, columns.value, 1)
        return self._strided(fused, (1, heads, rows, width), strides, offset)

    def zero_(self, tensor: Handle) -> None:
        self._call("zero_", tensor)

    def copy_(self, target: Handle, source: Handle) -> None:
        """With a conversion where the types differ."""
        self._call("copy_", target, source, 0)

    def multiply(self, a: Handle, b: Handle) -> Handle:
        return self._made("mul_Tensor", a, b)

    def add(self, a: Handle, b: Handle) -> Handle:
        return self._made("add_Tensor", a, b, ctypes.c_double(1.0))

    def add_number(self, a: Handle, number: float) -> Handle:
        return self._made("add_Scalar", a, ctypes.c_double(number), ctypes.c_double(1.0))

    def power(self, a: Handle, exponent: float) -> Handle:
        return self._made("pow_Tensor_Scalar", a, ctypes.c_double(exponent))

    def concatenate(self, tensors: Sequence[Handle], axis: int) -> Handle:
        count = len(tensors)
        return self._made("cat", (Handle * count)(*tensors), ctypes.c_int64(count), ctypes.c_int64(axis))

    def pick_rows(self, a: Handle, index: Handle) -> Handle:
        """`a[index]`."""
        pointers = (ctypes.POINTER(Handle) * 1)(ctypes.pointer(index))
        return self._made("index_Tensor", a, pointers, ctypes.c_int64(1))

    def unary(self, name: str, a: Handle) -> Handle:
        """An operator of one tensor: `rsqrt`, `cos`, `sin`, `silu`."""
        return self._dispatch(name, [self._passed(a)])

    def mean(self, a: Handle) -> Handle:
        """Of all values: the kernel of a mean over one axis, too."""
        return self._dispatch("mean", [self._passed(a), _NONE])

    def linear(self, x: Handle, weight: Handle) -> Handle:
        """`x @ weight.T`."""
        return self._dispatch("linear", [self._passed(x), self._passed(weight), _NONE])

    def add_product(self, out: Handle, bias: Handle, x: Handle, weight_transposed: Handle) -> None:
        """`out = bias + x @ weight_transposed`, as a linear layer with a bias runs it."""
        one = ctypes.c_double(1.0)
        self._call(f"{self.device}_addmm_out", out, bias, x, weight_transposed, one, one)

    def rms_norm(self, x: Handle, weight: Handle, width: int) -> None:
        """The fused norm over the last axis; not on a CPU, where torch composes it."""
        if self.device == "cuda":
            eps, rest = ctypes.c_double(1e-5), (Handle(), Handle())
            self._call(
                "cuda__fused_rms_norm", x, _longs((width,)), ctypes.c_int64(1), ctypes.byref(weight),
                ctypes.byref(eps), *map(ctypes.byref, rest),
            )  # fmt: skip
            self._handles.extend(rest)

    def flash_attention(self, q: Handle, k: Handle, v: Handle, causal: bool) -> None:
        """[1, H, S, K] x [1, G, S, K] x [1, G, S, K]; on a CPU what torch chooses."""
        if self.device == "cpu":
            tensors = [self._passed(tensor) for tensor in (q, k, v)]
            numbers = [_NONE, _bits(0.0), int(causal), _NONE, 1]
            self._dispatch("scaled_dot_product_attention", tensors + numbers)
            return
        self._attention("cuda__scaled_dot_product_flash_attention", q, k, v, (), causal)

    def cudnn_attention(self, q: Handle, k: Handle, v: Handle) -> None:
        """Not causal; nothing on a CPU."""
        if self.device == "cuda":
            no_bias, no_sums = Handle(), ctypes.c_int32(0)
            self._attention(
                "cuda__scaled_dot_product_cudnn_attention", q, k, v, (no_bias, no_sums), causal=False
            )

    def first_value(self, tensor: Handle) -> float:
        """The first value of a float32 tensor on the CPU."""
        address = ctypes.c_void_p()
        self._call("get_data_ptr", tensor, ctypes.byref(address))
        assert address.value is not None, "the tensor has memory"
        return ctypes.c_float.from_address(address.value).value

    def close(self) -> None:
        """Give every tensor back to torch's allocator, in the order of its stream. May be called twice."""
        handles, self._handles = self._handles, []
        self._delete(handles)

    # ---- calls

    def _delete(self, handles: Sequence[Handle]) -> None:
        for handle in handles:
            if handle.value:
                self._call("delete_tensor_object", handle)

    def _attention(
        self, name: str, q: Handle, k: Handle, v: Handle, before: Sequence[object], causal: bool
    ) -> None:
        tensors = [Handle() for _ in range(7)]
        lengths = [ctypes.c_int64(), ctypes.c_int64()]
        returned = [ctypes.byref(item) for item in (*tensors[:4], *lengths, *tensors[4:])]
        self._call(name, q, k, v, *before, ctypes.c_double(0.0), int(causal), 0, None, *returned)
        self._handles.extend(tensors)

    def _strided(
        self, tensor: Handle, sizes: Sequence[int], strides: Sequence[int], offset: int = 0
    ) -> Handle:
        out, first = Handle(), ctypes.c_int64(offset)
        count, lengths, steps = ctypes.c_int64(len(sizes)), _longs(sizes), _longs(strides)
        self._call("_reinterpret_tensor", tensor, count, lengths, steps, first, ctypes.byref(out))
        return self._own(out)

    def _made(self, name: str, *arguments: object) -> Handle:
        out = Handle()
        self._call(f"{self.device}_{name}", *arguments, ctypes.byref(out))
        return self._own(out)

    def _dispatch(self, name: str, arguments: list[int]) -> Handle:
        """An operator by its name; tensors among the arguments are handed over."""
        stack = (ctypes.c_uint64 * max(len(arguments), 1))(*arguments)
        self._call("call_dispatcher", f"aten::{name}".encode(), b"", stack)
        return self._own(Handle(stack[0]))

    def _passed(self, tensor: Handle) -> int:
        """A second handle to give away."""
        out = Handle()
        self._call("new_tensor_handle", tensor, ctypes.byref(out))
        assert out.value is not None, "a tensor has a handle"
        return out.value

    def _own(self, handle: Handle) -> Handle:
        self._handles.append(handle)
        return handle

    def _call(self, name: str, *arguments: object) -> None:
        code = self._function(name)(*(_typed(argument) for argument in arguments))
        if code:
            raise CapabilityError("an operator of torch failed", where=f"aoti_torch_{name}", found=code)

    def _constant(self, name: str) -> int:
        return int(self._function(name)())

    def _function(self, name: str) -> ctypes._NamedFuncPointer:
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = self._find(name)
        return function

    def _find(self, name: str) -> ctypes._NamedFuncPointer:
        is_quick = name in _QUICK or name.startswith(("dtype_", "device_type_"))
        for library in self._locked if is_quick else self._libraries:
            found = getattr(library, f"aoti_torch_{name}", None)
            if found is not None:
                function: ctypes._NamedFuncPointer = found
                function.restype = ctypes.c_int32
                return function
        raise CapabilityError("this torch has no such function", where=f"aoti_torch_{name}")


def _typed(argument: object) -> object:
    """Plain integers are the interface's int32; sizes are passed as arrays, counts as c_int64 where it says so."""
    return ctypes.c_int32(argument) if isinstance(argument, int) else argument


def _contiguous(sizes: Sequence[int]) -> list[int]:
    return [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]


def _longs(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * max(len(values), 1))(*values)


def _bits(number: float) -> int:
    """A float as the dispatcher's 64 bits."""
    return ctypes.c_uint64.from_buffer(ctypes.c_double(number)).value
