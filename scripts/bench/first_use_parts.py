"""The first uses of a start, one function each, in the order in which a start makes them. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from runtime.families.minimax_h3.products import block_products, end_products, refiner_products, text_products

if TYPE_CHECKING:
    from runtime.nodes import WorkerStart

Part = tuple[str, Callable[[], object]]


def parts(start: WorkerStart, results: dict[str, Any]) -> Iterator[Part]:
    """Name and work of each; what one makes, later ones use."""
    device = start.device
    yield "torch check", lambda: start.check_torch(results)  # type: ignore[arg-type]
    results["kernels"] = None
    if device == "cuda":
        yield "torch.cuda init", torch.cuda.init
    yield "first allocation", lambda: torch.empty(1, device=device)
    yield "models", lambda: start.models(results)  # type: ignore[arg-type]
    yield from _compute(start, results)
    yield from _elementwise(results, device)
    yield from _products(results, device)
    yield from _attention(results, device)
    yield from _kernels(results, device)
    family, request, compute = results["family"], results["request"], results["compute"]
    yield "library warm-up", lambda: family.warm_up_libraries(request, device)
    yield "conditioner warm-up", lambda: family.warm_up_conditioner(request, compute)
    yield "denoiser warm-up", lambda: family.warm_up_denoiser(request, compute, ("memory", "step"))


def _compute(start: WorkerStart, results: dict[str, Any]) -> Iterator[Part]:
    """What the node `compute` does, piece by piece, and then the node itself."""

    def imports() -> None:
        import kernels.attention
        import kernels.cubin
        import kernels.ops  # noqa: F401 (the import is the work)

    yield "compute: imports", imports
    if start.device == "cuda":
        from kernels.attention import choose_backend
        from kernels.cubin import open_kernels

        opened: list[Any] = []
        capability = torch.cuda.get_device_capability()
        documents = results["manifest"].kernels

        def load() -> None:
            opened.append(open_kernels(start.directory / "kernels", documents, capability))

        yield "compute: open cubins", load
        (kernel_set,) = opened  # the caller has run the part before it asks for the next
        yield "compute: bind cubins", kernel_set.bind
        yield (
            "compute: choose backend",
            lambda: choose_backend(torch.device("cuda"), torch.bfloat16, start.settings.attention),
        )

    def node() -> None:
        results["compute"] = start.compute(results)  # type: ignore[arg-type]

    yield "compute again", node


def _elementwise(results: dict[str, Any], device: str) -> Iterator[Part]:
    """The kernels of torch that norms, rotation, gate and embedding use."""
    text = results["family"].capabilities.config.text
    rows, D, K = results["request"].parts["sequence"].num_text, text.hidden_size, text.head_dim
    x: dict[str, Tensor] = {}

    def make(name: str, value: Callable[[dict[str, Tensor]], Tensor]) -> Part:
        def run() -> None:
            x[name] = value(x)

        return f"kernel: {name}", run

    yield make("zeros bf16", lambda _: torch.zeros(rows, D, dtype=torch.bfloat16, device=device))
    yield make("copy from host", lambda _: torch.zeros(rows, dtype=torch.long).to(device))
    yield make("index", lambda x: x["zeros bf16"][x["copy from host"]])
    yield make("bf16 to float32", lambda x: x["zeros bf16"].float())
    yield make("pow", lambda x: x["bf16 to float32"].pow(2))
    yield make("mean", lambda x: x["pow"].mean(-1, keepdim=True))
    yield make("add number", lambda x: x["mean"] + 1e-6)
    yield make("rsqrt", lambda x: x["add number"].rsqrt())
    yield make("multiply float32", lambda x: x["bf16 to float32"] * x["rsqrt"])
    yield make("float32 to bf16", lambda x: x["multiply float32"].to(torch.bfloat16))
    yield make("multiply bf16", lambda x: x["zeros bf16"] * x["float32 to bf16"])
    yield make("add bf16", lambda x: x["zeros bf16"] + x["multiply bf16"])
    yield make("silu", lambda x: functional.silu(x["add bf16"]))
    yield make("cos", lambda x: x["pow"][:, : K // 2].cos())
    yield make("sin", lambda x: x["pow"][:, : K // 2].sin())
    yield make("subtract bf16", lambda x: x["add bf16"][:, :K] - x["silu"][:, :K])
    yield make("cat", lambda x: torch.cat((x["add bf16"], x["silu"]), dim=-1))
    yield make("rms_norm", lambda x: functional.rms_norm(x["add bf16"], (D,), x["silu"][0], 1e-5))


def _products(results: dict[str, Any], device: str) -> Iterator[Part]:
    """The handle alone, then every shape of the conditioner twice."""
    config = results["family"].capabilities.config
    rows = results["request"].parts["sequence"].num_text
    if device == "cuda":
        yield "cuBLAS handle", torch.cuda.current_blas_handle
    (D, T), *blocks = refiner_products(config.transformer)
    for width, inner in [*text_products(config.text), *blocks]:
        weight = torch.zeros(width, inner, dtype=torch.bfloat16, device=device)
        given = torch.zeros(rows, inner, dtype=torch.bfloat16, device=device)
        for again in ("", " again"):
            yield f"product {width} x {inner}{again}", partial(functional.linear, given, weight)
    weight = torch.zeros(D, T, dtype=torch.bfloat16, device=device)
    given = torch.zeros(rows, T, dtype=torch.bfloat16, device=device)
    bias = torch.zeros(D, dtype=torch.bfloat16, device=device)
    yield "product with bias", partial(functional.linear, given, weight, bias)
    yield from _step_products(results, device)


def _step_products(results: dict[str, Any], device: str) -> Iterator[Part]:
    """Of one evaluation: float32 ones of both ends at their own rows, then a block's."""
    config, sequence = results["family"].capabilities.config, results["request"].parts["sequence"]
    counts = {"video": sequence.num_video, "audio": sequence.num_audio}
    for stream, width, inner in end_products(config.transformer):
        weight, bias = torch.zeros(width, inner, device=device), torch.zeros(width, device=device)
        given = torch.zeros(counts[stream], inner, device=device)
        yield f"float32 product {width} x {inner}", partial(functional.linear, given, weight, bias)
    for width, inner in block_products(config.transformer):
        weight = torch.zeros(width, inner, dtype=torch.bfloat16, device=device)
        given = torch.zeros(sequence.num_rows, inner, dtype=torch.bfloat16, device=device)
        for again in ("", " again"):
            yield f"block's product {width} x {inner}{again}", partial(functional.linear, given, weight)


def _attention(results: dict[str, Any], device: str) -> Iterator[Part]:
    """At the conditioner's and the denoiser's sizes."""
    compute, config = results["compute"], results["family"].capabilities.config
    sequence, text = results["request"].parts["sequence"], config.text
    heads, groups, K = text.num_attention_heads, text.num_key_value_heads, text.head_dim
    fused = torch.zeros(sequence.num_text, heads + 2 * groups, K, dtype=torch.bfloat16, device=device)
    q, k, v = fused[:, :heads], fused[:, heads : heads + groups], fused[:, heads + groups :]
    for again in ("", " again"):
        yield f"attention: text{again}", lambda: compute.short_attention(q, k, v, causal=True)
    H, A = config.transformer.num_attention_heads, config.transformer.attention_head_dim
    refined = torch.zeros(sequence.num_text, 3, H, A, dtype=torch.bfloat16, device=device)
    yield "attention: refiner", lambda: compute.short_attention(*refined.unbind(1))
    for again in ("", " again"):
        yield f"attention: denoiser{again}", lambda: compute.warm_attention(sequence.num_rows, H, A)


def _kernels(results: dict[str, Any], device: str) -> Iterator[Part]:
    """One launch of a compiled operator (eagerly where there is none)."""
    operators = results["compute"].operators
    if operators is not None:
        transformer = results["family"].capabilities.config.transformer
        D = transformer.hidden_size
        x, weight = torch.zeros(64, D, dtype=torch.bfloat16, device=device), torch.ones(D, device=device)
        yield "own kernel: rms_norm", lambda: operators.rms_norm(x, weight.bfloat16(), transformer.norm_eps)
