"""What a request's conditioner uses first, as far as it needs nothing but torch: it runs while the models are imported.

Most of it waits for the driver without the interpreter lock: the device's first memory, cuBLAS and its kernels, which belong to the
shape of a product. `warm_up.condition_on_zeros` follows with everything else.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from runtime.families.minimax_h3.config import H3Config
from runtime.families.minimax_h3.products import largest, refiner_products, text_products
from runtime.families.minimax_h3.shards import WHOLE, Share


@torch.inference_mode()
def multiply_first(
    config: H3Config, rows: int, dtype: torch.dtype, device: str, share: Share = WHOLE
) -> None:
    """Each product of a text layer and of the refiner once, on zeros; not waited for.

    Args:
        rows: of the conditioner. dtype: of its matrices. share: on several ranks, over how many of them what is spread.
    """
    with_bias, *blocks = refiner_products(config.transformer, one_by_one=share.rows > 1)
    text, refined = text_products(config.text, share.conditioner), share.part(rows)
    memory = torch.zeros(largest([with_bias, *text, *blocks]), dtype=dtype, device=device)

    def multiply(rows: int, width: int, inner: int, bias: torch.Tensor | None = None) -> None:
        x = torch.zeros(rows, inner, dtype=dtype, device=device)
        functional.linear(x, memory[: width * inner].view(width, inner), bias)

    for shape in text:
        multiply(rows, *shape)
    for shape in blocks:
        multiply(refined, *shape)
    multiply(refined, *with_bias, torch.zeros(with_bias[0], dtype=dtype, device=device))
