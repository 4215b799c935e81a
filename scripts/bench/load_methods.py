"""One way of loading a component in a fresh process; prints one JSON object. Started by `scripts.bench.load_state_dict`.

`call_s` is the load alone, with its libraries imported and the CUDA context up. `process_s` counts from the first
instruction, as a program that does nothing but this load would wait.
"""

import time

T0 = time.monotonic()

# ruff: noqa: E402 (the clock starts before the other imports)
import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Figures = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method", choices=sorted(METHODS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    print(json.dumps(METHODS[args.method](args.folder, args.device)))
    return 0


def _stream_first(folder: Path, device: str) -> Figures:
    """As the loader is meant to be used: the bytes move while torch is being imported."""
    from loader.plain_files import plan_files
    from loader.stream import start

    with start(plan_files(folder), folder, device=device) as stream:
        import torch  # noqa: F401

        state = stream.state_dict()
        _synchronize(device)
        return {"process_s": time.monotonic() - T0, "path": stream.path, **_contents(state, device)}


def _stream_call(folder: Path, device: str) -> Figures:
    from loader.plain_files import plan_files
    from loader.stream import start

    _warm(device)
    started = time.monotonic()
    with start(plan_files(folder), folder, device=device) as stream:
        state = stream.state_dict()
        return {**_clock(started, device), "path": stream.path, **_contents(state, device)}


def _safetensors(folder: Path, device: str) -> Figures:
    from safetensors.torch import load_file

    _warm(device)
    started = time.monotonic()
    state: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        state |= load_file(path, device=device)
    return {**_clock(started, device), **_contents(state, device)}


def _from_pretrained(folder: Path, device: str) -> Figures:
    """`from_pretrained(...).to(device)` of the library that owns the component."""
    import torch

    model_class = _model_class(folder)
    _warm(device)
    started = time.monotonic()
    model = model_class.from_pretrained(folder, dtype=torch.bfloat16).to(device)
    return {**_clock(started, device), **_contents(_parameters(model), device)}


def _device_map(folder: Path, device: str) -> Figures:
    """`from_pretrained(..., device_map=device)`."""
    import torch

    model_class = _model_class(folder)
    _warm(device)
    started = time.monotonic()
    model = model_class.from_pretrained(folder, dtype=torch.bfloat16, device_map=device)
    return {**_clock(started, device), **_contents(_parameters(model), device)}


def _stream_module(folder: Path, device: str) -> Figures:
    """The same module through the ring: built without parameters while the bytes move, then given its tensors."""
    import torch
    from torch.nn.modules.module import register_module_parameter_registration_hook

    from loader.plain_files import plan_files
    from loader.stream import start

    def without_memory(
        module: object, name: str, parameter: "Tensor"
    ) -> Any:  # torch declares None, and uses it
        return torch.nn.Parameter(parameter.to("meta"), requires_grad=False)

    model_class = _model_class(folder)
    _warm(device)
    started = time.monotonic()
    with start(plan_files(folder), folder, device=device) as stream:
        with register_module_parameter_registration_hook(without_memory):
            model = _from_config(model_class, folder)
        model.load_state_dict(stream.state_dict(), assign=True)  # whatever types the files have
        for buffer in model.buffers():
            buffer.data = buffer.data.to(device)
        return {**_clock(started, device), "path": stream.path, **_contents(_parameters(model), device)}


METHODS: Mapping[str, Callable[[Path, str], Figures]] = {
    "stream_first": _stream_first,
    "stream_call": _stream_call,
    "safetensors": _safetensors,
    "from_pretrained": _from_pretrained,
    "device_map": _device_map,
    "stream_module": _stream_module,
}


def _model_class(folder: Path) -> Any:
    if folder.name == "transformer":
        from diffusers import MiniMaxH3Transformer3DModel

        return MiniMaxH3Transformer3DModel
    from transformers import Qwen3VLForConditionalGeneration

    return Qwen3VLForConditionalGeneration


def _from_config(model_class: Any, folder: Path) -> Any:
    if hasattr(model_class, "load_config"):  # diffusers
        return model_class.from_config(model_class.load_config(folder))
    return model_class(model_class.config_class.from_pretrained(folder))


def _parameters(model: Any) -> dict[str, "Tensor"]:
    return dict(model.named_parameters())


def _warm(device: str) -> None:
    """torch is imported and the device's context is up."""
    import torch

    torch.zeros(1, device=device)
    _synchronize(device)


def _clock(started: float, device: str) -> Figures:
    _synchronize(device)
    now = time.monotonic()
    return {"call_s": now - started, "process_s": now - T0}


def _synchronize(device: str) -> None:
    import torch

    if device != "cpu":
        torch.cuda.synchronize()


def _contents(state: Mapping[str, "Tensor"], device: str) -> Figures:
    """What was loaded, so that the driver can hold the methods against each other; after the clock."""
    kinds = {tensor.device.type for tensor in state.values()}
    assert kinds == {device.partition(":")[0]}, kinds
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    return {"tensors": len(state), "bytes": size, "byte_sum": _byte_sum(state.values())}


def _byte_sum(tensors: Iterable["Tensor"]) -> int:
    import torch

    return sum(
        int(t.detach().reshape(-1).view(torch.uint8).sum(dtype=torch.int64)) for t in tensors if t.numel()
    )


if __name__ == "__main__":
    raise SystemExit(main())
