"""One phase of the diffusers peer in a fresh process; prints one JSON object. Started by `scripts.bench.peer_diffusers`.

Nothing of this project is imported before the clock of the imports has stopped.
"""

import time

T0 = time.monotonic()

# ruff: noqa: E402 (the clock starts before the other imports)
import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

_kept: list[Any] = []  # models stay on the device, as in a worker


def main() -> int:
    args = _parser().parse_args()
    figures: dict[str, Any] = {"imports": _import_peer()}
    if args.phase != "imports":
        run = {"text_encoder": _text_encoder, "transformer": _transformer, "whole": _whole}[args.phase]
        figures |= run(args)
    figures["process_s"] = time.monotonic() - T0
    print(json.dumps(figures))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("phase", choices=("imports", "text_encoder", "transformer", "whole"))
    parser.add_argument("--directory", type=Path, help="published layout")
    parser.add_argument("--preset", default="full")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--placement", choices=("to", "device_map"), default="to")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--size", default="768x768")
    parser.add_argument("--num-frames", type=int, default=124)
    return parser


def _import_peer() -> dict[str, float]:
    """What a program for this model imports: torch, the pipeline of diffusers, the text encoder of transformers."""
    started = time.monotonic()
    import torch  # noqa: F401

    torch_done = time.monotonic()
    from diffusers import MiniMaxH3Transformer3DModel  # noqa: F401
    from diffusers.modular_pipelines.minimax_h3 import MiniMaxH3Blocks  # noqa: F401
    from transformers import Qwen3VLForConditionalGeneration  # noqa: F401

    done = time.monotonic()
    return {"torch_s": torch_done - started, "others_s": done - torch_done, "all_s": done - started}


def _whole(args: argparse.Namespace) -> dict[str, Any]:
    """Encoder and transformer in one process, as a worker would hold them; entry is counted from the first import."""
    args.placement = (
        "device_map"  # the faster way for the encoder, `to` for the transformer, where each was tried
    )
    encoder = _text_encoder(args)
    args.placement = "to"
    transformer = _transformer(args)
    return {"text_encoder": encoder, "transformer": transformer, "first_dit_entry_s": transformer["entry_s"]}


def _text_encoder(args: argparse.Namespace) -> dict[str, Any]:
    """Load, then encode a prompt twice with the pipeline's own function."""
    import torch
    from diffusers.modular_pipelines.minimax_h3.encoders import get_qwen3vl_prompt_embeds
    from transformers import Qwen3VLForConditionalGeneration

    folder = args.directory / "text_encoder"
    model, load = _load(Qwen3VLForConditionalGeneration, folder, args)
    vocabulary = model.config.text_config.vocab_size
    special = min(model.config.image_token_id, model.config.video_token_id)
    ids = torch.randint(0, min(vocabulary, special) // 2, (args.tokens,), generator=torch.manual_seed(0))

    def encode() -> torch.Tensor:
        embeds = get_qwen3vl_prompt_embeds(
            model, _TextProcessor(), ids.tolist(), device=torch.device(args.device), dtype=model.dtype
        )
        assert torch.isfinite(embeds).all()
        return embeds

    _kept.append(model)
    with torch.no_grad():
        seconds = [_timed(encode, args.device) for _ in range(1 if args.phase == "whole" else 2)]
    return {**load, "first_encode_s": seconds[0], "second_encode_s": seconds[-1], "tokens": args.tokens,
            **_memory(args.device)}  # fmt: skip


class _TextProcessor:
    """The part of Qwen3VLProcessor that a prompt without pictures needs."""

    def create_mm_token_type_ids(self, batch: list[list[int]]) -> list[list[int]]:
        return [[0] * len(ids) for ids in batch]


def _transformer(args: argparse.Namespace) -> dict[str, Any]:
    """Load, then run two steps at the request's size; the second is the warm one."""
    import torch
    from diffusers import MiniMaxH3Transformer3DModel

    model, load = _load(MiniMaxH3Transformer3DModel, args.directory / "transformer", args)
    entry_s = time.monotonic() - T0  # what packing the inputs takes is not counted
    inputs, num_rows = _step_inputs(args)

    def step() -> None:
        video, audio = model(**inputs, return_dict=False)
        assert torch.isfinite(video).all()
        assert torch.isfinite(audio).all()

    with torch.no_grad():
        seconds = [_timed(step, args.device) for _ in range(2)]
    return {**load, "entry_s": entry_s, "first_step_s": seconds[0], "warm_step_s": seconds[1], "num_rows": num_rows,
            **_memory(args.device)}  # fmt: skip


def _step_inputs(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Arguments of one t2va forward; the layout is the one of both pipelines (tests hold them equal)."""
    import torch

    from runtime.families.minimax_h3.canvas import audio_latents, latent_frames
    from runtime.families.minimax_h3.config import TAG_TEXT
    from runtime.families.minimax_h3.packing import KIND_AUDIO, pack
    from scripts.tiny_presets import preset

    config = preset(args.preset).model
    width, height = (int(side) // 16 for side in args.size.split("x"))
    shape = (latent_frames(args.num_frames), height, width)
    rows = pack(config, [TAG_TEXT] * args.tokens, shape, audio_latents(args.num_frames))
    every = torch.arange(rows.num_rows, device=args.device)

    def normal(count: int, channels: int) -> torch.Tensor:
        return torch.randn(1, count, channels, device=args.device)

    inputs = {
        "hidden_states": normal(rows.num_video, config.transformer.video_row_dim),
        "audio_hidden_states": normal(rows.num_audio, config.transformer.audio_in_channels),
        "encoder_hidden_states": normal(rows.num_text, config.transformer.text_dim).to(torch.bfloat16),
        "timestep": torch.tensor([1.0, 0.98], device=args.device),  # video and text rows; audio rows
        "timestep_indices": torch.from_numpy((rows.modulation_index == KIND_AUDIO).astype("int64")).to(
            args.device
        ),
        "token_tags": torch.from_numpy(rows.token_tags).to(args.device),
        "position_ids": torch.from_numpy(rows.position_ids).to(args.device),
        "video_indices": every[rows.video],
        "audio_indices": every[rows.audio],
        "text_indices": every[rows.text],
    }
    return inputs, rows.num_rows


def _load(model_class: Any, folder: Path, args: argparse.Namespace) -> tuple[Any, dict[str, float]]:
    """`from_pretrained` in bf16 onto the device; seconds with the device's own start-up in them."""
    import torch

    options: dict[str, Any] = {"dtype": torch.bfloat16}
    if args.placement == "device_map":
        options["device_map"] = args.device
    started = time.monotonic()
    model = model_class.from_pretrained(folder, **options)
    read = time.monotonic()
    model = model.to(args.device).eval()
    _synchronize(args.device)
    done = time.monotonic()
    wrong = {str(t.device) for t in model.parameters()} - {args.device, f"{args.device}:0"}
    assert not wrong, f"parameters on {wrong}"
    return model, {"from_pretrained_s": read - started, "to_device_s": done - read, "load_s": done - started}


def _timed(call: Callable[[], Any], device: str) -> float:
    _synchronize(device)
    started = time.monotonic()
    call()
    _synchronize(device)
    return time.monotonic() - started


def _synchronize(device: str) -> None:
    import torch

    if device != "cpu":
        torch.cuda.synchronize()


def _memory(device: str) -> dict[str, float]:
    import torch

    return {} if device == "cpu" else {"device_peak_gb": torch.cuda.max_memory_allocated() / 1e9}


if __name__ == "__main__":
    raise SystemExit(main())
