"""The decode bench: its peer has the same weights, and its dry run reaches every line that needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from runtime.families.minimax_h3.model.audio_vae import AudioDecoder
from runtime.families.minimax_h3.model.video_decoder import VideoDecoder
from scripts.bench.decode_parts import _NAMED, _by_name, _in_halves, _three_products
from scripts.bench.decode_weights import RandomDecoderWeights
from scripts.tiny_presets import preset

ROOT = Path(__file__).parents[3]


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_the_peer_decodes_what_we_decode() -> None:
    from scripts.bench.decode_peer import Peer

    config = preset("test").model
    weights = RandomDecoderWeights(config, "cpu", torch.float32)
    torch.manual_seed(0)
    video = torch.randn(config.video_vae.latent_channels, 12, 18, 20)  # several tiles, two units
    audio = torch.randn(2, config.audio_vae.latent_channels, 9)
    peer = Peer(weights, torch.float32)
    with torch.inference_mode():
        pixels = VideoDecoder(config.video_vae, weights, "cpu").decode(video)
        samples = AudioDecoder(config.audio_vae, weights, "cpu").decode(audio)
        theirs = peer._pixels(video)[0].transpose(0, 1), peer._sound(audio)
    assert pixels.std() > 0.01
    torch.testing.assert_close(pixels, theirs[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(samples, theirs[1], rtol=0, atol=1e-6)


def test_halves_multiply_like_float32() -> None:
    """Only the product of both low halves is missing: 2^-22 of the sum of absolute products."""
    torch.manual_seed(1)
    x, w = torch.randn(64, 256), torch.randn(256, 96) / 16
    bound = 2**-21 * (x.abs() @ w.abs())
    exact = x.double() @ w.double()
    assert ((_in_halves(x, _three_products(w)) - exact).abs() <= bound).all()


def test_operations_are_summed_by_name_the_longest_first() -> None:
    events = [
        ("norm", 100.0),
        ("product", 900.0),
        ("norm", 50.0),
        *((f"small {i}", 1.0) for i in range(_NAMED)),
    ]
    *named, others = _by_name(events)
    assert named[:2] == [{"name": "product", "count": 1, "ms": 0.9}, {"name": "norm", "count": 2, "ms": 0.15}]
    assert len(named) == _NAMED
    assert others == {"name": "others", "count": 2, "ms": 0.002}


@pytest.mark.slow
def test_the_dry_run_reaches_its_end() -> None:
    line = "-m scripts.bench.decode --preset test --device cpu --size 96x64 --frames 22,39,56 --repeat 1"
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *line.split()], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["targets"]["decoder_calls_10s"]["value"] == 2
    assert set(last["targets"]) == {
        "decoder_calls_10s", "file_complete_after_last_kernel_ms", "decode_and_file_vs_diffusers",
    }  # fmt: skip
    assert last["peer"]["seconds"]["total"] > 0
