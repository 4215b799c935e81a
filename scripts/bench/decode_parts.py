"""What the decode consists of, each part alone: products, attention, launches, a CUDA graph, roundings, encoding.

Used by `scripts.bench.decode`. Every figure answers a question of docs/log.md: what is the floor, what would a graph
save, what does a rounding cost.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from runtime.encoders import Encoders
from runtime.families.minimax_h3.config import H3Config
from runtime.families.minimax_h3.model.picture_units import DecodedUnit
from runtime.families.minimax_h3.model.tiling import TilePlan
from runtime.families.minimax_h3.model.video_decoder import VideoDecoder
from runtime.families.minimax_h3.model.video_vae_pixels import to_uint8
from runtime.family import MediaPlan
from runtime.media.unit_encoder import PictureOptions
from runtime.ops.tile_attention import TileAttention
from scripts.bench.decode_weights import RandomDecoderWeights

Figures = dict[str, Any]
_REPEATS = 3
_QUEUED = 8  # calls in a row, so that the device never waits for the host
_NAME_LENGTH = 120
_NAMED = 30  # operations of a unit that are listed, those that take longest


class Parts:
    """Measurements on one decoder. latents: [C, T, h, w] of a whole clip; its first unit is decoded again and again."""

    def __init__(
        self,
        config: H3Config,
        weights: RandomDecoderWeights,
        decoder: VideoDecoder,
        encoders: Encoders,
        media: MediaPlan,
        latents: Tensor,
    ) -> None:
        self.config, self.weights = config, weights
        self.decoder, self.encoders = decoder, encoders
        self.media, self.latents = media, latents
        self.device = decoder.device
        self.plan = decoder.plan(latents)
        ratio = config.video_vae.spatial_ratio
        self.canvas = TilePlan.of_canvas(media.height, media.width, ratio, decoder.tiles)
        self.tiles = len(self.canvas.rows.starts) * len(self.canvas.cols.starts)

    def all(self) -> Mapping[str, Callable[[], Any]]:
        """Name in the result → measurement, in the order in which they are to run."""
        return {
            "products": self.products,
            "attention_alone": self.attention,
            "unit_by_batch": self.batches,
            "unit_by_attention": self.attention_backends,
            "unit_eager_operators": self.eager,
            "launches": self.launches,
            "graph": self.graph,
            "proj_out": self.proj_out,
            "encode_22_frames": self.encoding,
            "precision": self.precision,
        }

    # --- floors

    def products(self) -> Figures:
        """A block's four products with all tiles of a unit, in both half formats: the floor of a unit's time."""
        vae, rows = self.config.video_vae, self.tiles * self._tokens()
        width, inner = vae.decoder_dim, vae.decoder_dim * vae.decoder_ffn_mult
        shapes = {
            "qkv": (width, 3 * width),
            "out": (width, width),
            "fc1": (width, 2 * inner),
            "fc2": (inner, width),
        }
        figures: Figures = {"rows": rows}
        for dtype in (torch.float16, torch.bfloat16):
            total_ms, flops = 0.0, 0.0
            for name, (inputs, outputs) in shapes.items():
                x, w = self._random(rows, inputs, dtype=dtype), self._random(outputs, inputs, dtype=dtype)
                bias = self._random(outputs, dtype=dtype)
                ms = self._milliseconds(lambda x=x, w=w, b=bias: torch.nn.functional.linear(x, w, b))
                figures[f"{_short(dtype)} {name}"] = ms
                total_ms, flops = total_ms + ms, flops + 2.0 * rows * inputs * outputs
            figures[f"{_short(dtype)} unit_ms"] = total_ms * vae.decoder_num_layers
            figures[f"{_short(dtype)} tflops"] = flops / total_ms / 1e9
        return figures

    def attention(self) -> Figures:
        """A block's attention with all tiles of a unit, by backend: call by call, and calls that queue on the device."""
        vae, tokens = self.config.video_vae, self._tokens()
        heads, dim = vae.decoder_num_attention_heads, vae.decoder_attention_head_dim
        qkv = self._random(self.tiles, tokens, 3, heads, dim, dtype=self.decoder._network.compute_dtype)
        flops = 4.0 * self.tiles * tokens**2 * heads * dim
        figures: Figures = {}
        for backend in self._backends():
            attend = TileAttention(self.device, qkv.dtype, backend)
            ms = self._milliseconds(lambda attend=attend: attend(*qkv.unbind(2)))
            queued = self._milliseconds(
                lambda attend=attend: [attend(*qkv.unbind(2)) for _ in range(_QUEUED)]
            )
            figures[backend] = {"ms": ms, "queued_ms": queued / _QUEUED, "tflops": flops / ms / 1e9}
        return figures

    # --- one unit

    @torch.inference_mode()
    def batches(self) -> list[Figures]:
        """One unit with different tile batches: device time, the host's share, memory, and how far pixels move."""
        chosen, figures, reference = self.decoder.tile_batch, [], None
        for batch in sorted({self.tiles, -(-self.tiles // 2), -(-self.tiles // 4), 2, 1}, reverse=True):
            self.decoder.tile_batch = batch
            head = self._unit(self.decoder)
            self._reset_peak()
            start = time.perf_counter()
            head = self._unit(self.decoder, wait=False)
            queued = time.perf_counter() - start
            self._synchronize()
            seconds = time.perf_counter() - start
            reference = head if reference is None else reference
            moved = float((head - reference).abs().max())
            figures.append(
                {
                    "tile_batch": batch,
                    "unit_ms": seconds * 1e3,
                    "host_ms": queued * 1e3,
                    "peak_gpu_gib": self._peak(),
                    "largest_difference": moved,
                }
            )
        self.decoder.tile_batch = chosen
        return figures

    @torch.inference_mode()
    def attention_backends(self) -> Figures:
        network, figures, pixels = self.decoder._network, {}, []
        chosen = network.attention
        for backend in self._backends():
            network.attention = TileAttention(self.device, network.compute_dtype, backend)
            figures[f"{backend} unit_ms"] = self._milliseconds(lambda: self._unit(self.decoder, wait=False))
            pixels.append(self._unit(self.decoder))
        network.attention = chosen
        figures["largest_difference"] = float((pixels[0] - pixels[-1]).abs().max())
        return figures

    @torch.inference_mode()
    def eager(self) -> Figures:
        """The eager operators, beside the first row of `batches`."""
        eager = VideoDecoder(self.config.video_vae, self.weights, self.device, tile_batch=self.tiles)
        milliseconds = self._milliseconds(lambda: self._unit(eager, wait=False))
        difference = (self._unit(eager) - self._unit(self.decoder)).abs()
        return {
            "unit_ms": milliseconds,
            "largest": float(difference.max()),
            "mean": float(difference.mean()),
        }

    @torch.inference_mode()
    def launches(self) -> Figures:
        """Operations of one unit on the device, and the time between them: all that a graph could take away."""
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        is_cuda = self.device.type == "cuda"
        self._unit(self.decoder)
        with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as recorded:
            self._unit(self.decoder)
        wanted = DeviceType.CUDA if is_cuda else DeviceType.CPU
        events = [event for event in recorded.events() if event.device_type == wanted]
        spans = sorted((event.time_range.start, event.time_range.end) for event in events)
        if not spans:
            return {"count": 0, "note": "the profiler saw nothing on the device"}
        busy, until = 0.0, spans[0][0]
        for start, end in spans:
            busy, until = busy + max(0.0, end - max(start, until)), max(until, end)
        span = until - spans[0][0]
        return {
            "count": len(spans),
            "span_ms": span / 1e3,
            "idle_ms": (span - busy) / 1e3,
            "idle_share": (span - busy) / span,
            "idle_us_per_launch": (span - busy) / len(spans),
            "operations": _by_name((event.name, event.time_range.elapsed_us()) for event in events),
        }

    @torch.inference_mode()
    def graph(self) -> Figures:
        """One unit as a CUDA graph, replayed, against the same unit launched operation by operation."""
        if self.device.type != "cuda":
            return {"note": "no graphs on the CPU"}
        side = torch.cuda.Stream(self.device)
        with torch.cuda.stream(side):
            self._unit(self.decoder)
        reserved, graph = torch.cuda.memory_reserved(), torch.cuda.CUDAGraph()
        start = time.perf_counter()
        with torch.cuda.graph(graph, stream=side):
            head, _ = self.decoder.decode_unit(self.latents, 0, self.plan)
        capture = time.perf_counter() - start
        replayed = self._milliseconds(graph.replay)
        launched = self._milliseconds(lambda: self._unit(self.decoder, wait=False))
        graph.replay()
        self._synchronize()
        return {
            "unit_ms_launched": launched,
            "unit_ms_replayed": replayed,
            "saved_share": 1 - replayed / launched,
            "capture_ms": capture * 1e3,
            "held_gib": (torch.cuda.memory_reserved() - reserved) / 2**30,
            "equal": bool(torch.equal(head, self._unit(self.decoder))),
        }

    @torch.inference_mode()
    def proj_out(self) -> Figures:
        """The last product of a unit, which is float32: as it is, in TF32, and as three products of float16 halves."""
        vae = self.config.video_vae
        rows = self.tiles * (self._tokens() - vae.decoder_num_register_tokens - 1)
        outputs = vae.out_channels * vae.temporal_ratio * vae.spatial_ratio**2
        x = self._random(rows, vae.decoder_dim, dtype=torch.float32) * vae.decoder_dim**0.5
        w = self._random(vae.decoder_dim, outputs, dtype=torch.float32)
        exact = x[:64].double() @ w.double()
        flag = torch.backends.cuda.matmul.allow_tf32

        def tensor_float() -> Tensor:
            torch.backends.cuda.matmul.allow_tf32 = True
            try:
                return x @ w
            finally:
                torch.backends.cuda.matmul.allow_tf32 = flag

        def error(found: Tensor) -> float:
            return float((found[:64].double() - exact).abs().max() / exact.abs().max())

        thirds = _three_products(w)
        ways = {"float32": lambda: x @ w, "tf32": tensor_float, "halves": lambda: _in_halves(x, thirds)}
        return {name: {"ms": self._milliseconds(way), "error": error(way())} for name, way in ways.items()}

    @torch.inference_mode()
    def precision(self) -> Figures:
        """Numeric effect of the products' format on one unit of up to 512x512, against float32 everywhere."""
        latents = self.latents[:, :7, :32, :32]
        exact = RandomDecoderWeights(self.config, str(self.device), torch.float32)
        frames = {}
        for name in ("float32", "float16", "bfloat16"):
            decoder = VideoDecoder(
                self.config.video_vae,
                exact,
                self.device,
                precision="fp32" if name == "float32" else "fp16_linears",
            )
            if name == "bfloat16":
                decoder._network.compute_dtype = torch.bfloat16
            frames[name] = decoder.decode(latents)
        return {name: _difference(frames[name], frames["float32"]) for name in ("float16", "bfloat16")}

    # --- encoding

    @torch.inference_mode()
    def encoding(self) -> list[Figures]:
        """What is waited for at the very end: encoding one unit of 22 frames, by tune and threads of one session."""
        latents = self.latents[:, :7]
        plan = self.decoder.plan(latents)
        head, tail = self.decoder.decode_unit(latents, 0, plan)
        unit = DecodedUnit(self.decoder.join(head, None, tail, plan.units - 1, plan))
        figures = []
        for tune in ("zerolatency", ""):
            for threads in (2, 4, 8, 16):
                options = {**self.encoders.options, "tune": tune, "threads": threads}
                picture = PictureOptions(self.media.width, self.media.height, self.media.fps, **options)
                self.encoders.pool.start(picture, self.media.num_frames)
                runs = [self._encode(unit, picture) for _ in range(_REPEATS)]
                figures.append(
                    {
                        "tune": tune,
                        "threads": threads,
                        "unit_ms": statistics.median(ms for ms, _ in runs),
                        "bytes": runs[0][1],
                    }
                )
        return figures

    def _encode(self, unit: DecodedUnit, picture: PictureOptions) -> tuple[float, int]:
        """Milliseconds in an encoder process, and bytes."""
        slot = self.encoders.pool.memory.acquire(10)
        assert slot is not None
        arrival = unit.copy_into(slot.view)
        if arrival is not None:
            arrival()
        start = time.perf_counter()
        data = self.encoders.pool.encode(slot, unit.num_frames, unit.layout, picture).result()
        return (time.perf_counter() - start) * 1e3, len(data)

    # --- clocks

    def _unit(self, decoder: VideoDecoder, wait: bool = True) -> Tensor:
        head, _ = decoder.decode_unit(self.latents, 0, self.plan)
        if wait:
            self._synchronize()
        return head

    def _milliseconds(self, work: Callable[[], Any]) -> float:
        """Median of some runs, the device waited for, after one that is not counted."""
        work()
        found = []
        for _ in range(_REPEATS):
            self._synchronize()
            start = time.perf_counter()
            work()
            self._synchronize()
            found.append((time.perf_counter() - start) * 1e3)
        return statistics.median(found)

    def _tokens(self) -> int:
        vae, side = self.config.video_vae, self.canvas.rows.size // self.config.video_vae.spatial_ratio
        across = self.canvas.cols.size // vae.spatial_ratio
        return self.plan.window * side * across + vae.decoder_num_register_tokens + 1

    def _backends(self) -> tuple[str, ...]:
        return ("cudnn", "flash") if self.device.type == "cuda" else ("auto",)

    def _random(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Normal, scaled so that products stay near 1."""
        return torch.randn(*shape, device=self.device, dtype=dtype) * shape[-1] ** -0.5

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _reset_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def _peak(self) -> float:
        is_cuda = self.device.type == "cuda"
        return round(torch.cuda.max_memory_allocated() / 2**30, 2) if is_cuda else 0.0


def _by_name(events: Iterable[tuple[str, float]]) -> list[Figures]:
    """(name, microseconds) of every operation -> count and milliseconds by name, the longest first; the rest as one."""
    times: dict[str, list[float]] = {}
    for name, us in events:
        times.setdefault(name[:_NAME_LENGTH], []).append(us)
    ordered = sorted(times.items(), key=lambda item: -sum(item[1]))
    named, others = ordered[:_NAMED], [us for _, found in ordered[_NAMED:] for us in found]
    rows = [*named, ("others", others)] if others else named
    return [{"name": name, "count": len(found), "ms": round(sum(found) / 1e3, 3)} for name, found in rows]


def _difference(found: Tensor, exact: Tensor) -> Figures:
    difference = (found - exact).abs()
    mse = float(difference.square().mean())
    moved = (to_uint8(found) != to_uint8(exact)).float().mean()
    return {
        "largest": float(difference.max()),
        "mean": float(difference.mean()),
        "psnr_db": None if mse == 0 else round(-10 * torch.log10(torch.tensor(mse)).item(), 1),
        "bytes_that_differ": float(moved),
    }


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """float32 as the sum of two float16: 22 bits of it."""
    high = x.half()
    return high, (x - high.float()).half()


def _three_products(w: Tensor) -> Tensor:
    """[K, N] → [3 K, N] float16, the second factor of `_in_halves`."""
    high, low = _split(w)
    return torch.cat((high, low, high))


def _in_halves(x: Tensor, thirds: Tensor) -> Tensor:
    """x @ w without the product of the two low halves, summed in float32 by one product three times as long."""
    high, low = _split(x)
    long = torch.cat((high, high, low), dim=1)
    if x.device.type == "cuda":
        return torch.mm(long, thirds, out_dtype=torch.float32)
    return long.float() @ thirds.float()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
