"""Whether coding the same values again gives the same bytes, and what differs where it does not, by options of the coder."""

from __future__ import annotations

from typing import Any

import torch

from loader.codec.nvcomp import ELEMENTS, CompressOptions, Nvcomp
from loader.codec.pieces import PIECE_BYTES
from prepare.codec_gpu import PieceBatch

_BYTES = 16 << 20
_ROUNDS = 6
_SHIPPED = CompressOptions(0, ELEMENTS["BF16"], 0, 2)  # type, element, sub-chunks (0 = 8), states of a lane
_VARIANTS = {
    "as shipped": (_SHIPPED, PIECE_BYTES, False),
    "as shipped, memory holds other bytes each time": (_SHIPPED, PIECE_BYTES, True),
    "pieces of 64 KiB": (_SHIPPED, 65536, False),
    "pieces of 4 KiB": (_SHIPPED, 4096, False),
    "one state a lane": (CompressOptions(0, ELEMENTS["BF16"], 0, 1), PIECE_BYTES, False),
    "four sub-chunks": (CompressOptions(0, ELEMENTS["BF16"], 4, 2), PIECE_BYTES, False),
    "four sub-chunks, one state": (CompressOptions(0, ELEMENTS["BF16"], 4, 1), PIECE_BYTES, False),
    "as bytes": (CompressOptions(0, 1, 0, 2), PIECE_BYTES, False),
}


def measure_repeats() -> dict[str, Any]:
    """By variant; every coding is decoded and compared with the values."""
    codec = Nvcomp()
    generator = torch.Generator("cuda").manual_seed(5)
    values = torch.randn(_BYTES // 2, device="cuda", generator=generator) * 0.02
    plain = values.to(torch.bfloat16).view(torch.uint8)
    return {name: _variant(codec, plain, *variant) for name, variant in _VARIANTS.items()}


def _variant(
    codec: Nvcomp, plain: torch.Tensor, options: CompressOptions, piece_bytes: int, is_filled: bool
) -> dict[str, Any]:
    """Codings after the first against the first.

    Returns: pieces whose sizes and whose bytes were the same in every round, the least place of a difference, the mean number
    of bytes that differ in a piece that does (of those that both have), and least and most bytes of all pieces together.
    """
    stream = torch.cuda.current_stream().cuda_stream
    batch = PieceBatch(codec, plain, "", piece_bytes, stream, options)
    codings = []
    for number in range(_ROUNDS):
        coded, sizes = batch.pack(fill=0x30 * number if is_filled else 0)
        batch.prove(coded, sizes)
        codings.append((coded.view(-1, batch.room), sizes))
    first, lengths = codings[0]
    columns = torch.arange(batch.room, device=lengths.device)
    same_sizes = torch.ones_like(lengths, dtype=torch.bool)
    same_bytes, places, changed = same_sizes.clone(), [], []
    for coded, sizes in codings[1:]:
        both = torch.minimum(sizes, lengths)
        differs = (coded != first) & (columns < both[:, None])
        same_sizes &= sizes == lengths
        same_bytes &= (sizes == lengths) & ~differs.any(1)
        if bool(differs.any()):
            places.append(int(differs.any(0).nonzero()[0]))
            changed.append(float(differs.sum(1)[differs.any(1)].double().mean()))
    totals = [int(sizes.sum()) for _, sizes in codings]
    return {
        "pieces": len(lengths),
        "ratio": round(totals[0] / plain.numel(), 4),
        "same_sizes": int(same_sizes.sum()),
        "same_bytes": int(same_bytes.sum()),
        "first_difference": min(places, default=None),
        "bytes_that_differ": round(sum(changed) / len(changed), 1) if changed else 0,
        "total_bytes": [min(totals), max(totals)],
    }
