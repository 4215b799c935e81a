"""Audio decoder against diffusers, bit for bit in float32 on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from loader.errors import InternalError
from runtime.families.minimax_h3.model.audio_vae import AudioDecoder, fold_weight_norm
from runtime.families.minimax_h3.model.exact_convolution import exact_convolutions
from tests.fakes.h3_vae import WEIGHT_NORM_WARNING, audio_oracle, audio_parts

# Rates, kernels and blocks of the release at a sixteenth of its width.
RELEASE_SHAPED = {
    "encoder_dim": 1,
    "encoder_rates": (2, 4, 4, 5, 5),
    "decoder_dim": 128,
    "decoder_rates": (5, 5, 2, 2, 2, 2, 2),
    "decoder_kernel_sizes": (9, 9, 4, 4, 4, 4, 4),
    "resblock_kernel_sizes": (3, 7, 11),
    "resblock_dilation_sizes": ((1, 3, 5), (1, 3, 5), (1, 3, 5)),
    "sampling_rate": 32000,
}
TWO_KERNELS = {"resblock_kernel_sizes": (3, 5), "resblock_dilation_sizes": ((1, 3), (1, 2, 4))}
WIDE = {
    "latent_dim": 64,
    "latent_channels": 16,
    "decoder_dim": 48,
    "latents_mean": [0.2] * 16,
    "latents_std": [2.0] * 16,
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Equality of bits needs one thread: several cut a product by its shape, and convolutions may then sum in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _reference(oracle: Any, latents: Tensor) -> Tensor:
    mean, std = (
        torch.tensor(v).view(1, -1, 1) for v in (oracle.config.latents_mean, oracle.config.latents_std)
    )
    return oracle.decode(latents * std + mean).sample[:, 0]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("num_latents", [1, 2, 9, 40])
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({}, id="C64-tiny"),
        pytest.param(TWO_KERNELS, id="C64-two-kernels"),
        pytest.param(WIDE, id="C64-wide"),
    ],
)
def test_decode_equals_the_reference(overrides: dict[str, Any], num_latents: int, seed: int) -> None:
    oracle = audio_oracle(seed, **overrides)
    config, weights = audio_parts(oracle)
    latents = torch.randn(2, config.latent_channels, num_latents)

    samples = AudioDecoder(config, weights, "cpu").decode(latents)

    assert samples.shape == (2, 4 * num_latents)
    assert samples.dtype == torch.float32
    assert torch.equal(samples, _reference(oracle, latents))


def test_release_shaped_decode_equals_the_reference() -> None:
    oracle = audio_oracle(3, **RELEASE_SHAPED)
    config, weights = audio_parts(oracle)
    latents = torch.randn(2, 8, 13)

    samples = AudioDecoder(config, weights, "cpu").decode(latents)

    assert samples.shape == (2, 800 * 13)
    assert torch.equal(samples, _reference(oracle, latents))
    assert samples.std() > 1e-3


def test_samples_are_clamped() -> None:
    oracle = audio_oracle(0)
    oracle.decoder.conv_post.weight_g.data.mul_(1000.0)
    config, weights = audio_parts(oracle)

    samples = AudioDecoder(config, weights, "cpu").decode(torch.randn(2, 8, 20))

    assert samples.min() == -1.0
    assert samples.max() == 1.0


def test_channels_do_not_mix() -> None:
    config, weights = audio_parts(audio_oracle(1))
    decoder = AudioDecoder(config, weights, "cpu")
    latents = torch.randn(2, 8, 12)
    changed = latents.clone()
    changed[1] = 0.0

    assert torch.equal(decoder.decode(changed)[0], decoder.decode(latents)[0])


def test_weights_are_asked_for_once_and_not_before_the_first_decode() -> None:
    config, weights = audio_parts(audio_oracle(0))
    decoder = AudioDecoder(config, weights, "cpu")
    assert weights.asked == []

    first = decoder.decode(torch.ones(2, 8, 3))
    second = decoder.decode(torch.ones(2, 8, 3))

    assert weights.asked == ["audio_vae/decoder"]
    assert torch.equal(first, second)


@pytest.mark.parametrize("shape", [(2, 5, 3), (8, 3), (1, 2, 8, 3), (2, 8, 0)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    config, weights = audio_parts(audio_oracle(0))

    with pytest.raises(InternalError, match=r"audio decoder: latents: .*allowed: \[2, 8, T\]"):
        AudioDecoder(config, weights, "cpu").decode(torch.zeros(shape))


def test_outputs_need_no_grad() -> None:
    """C71."""
    config, weights = audio_parts(audio_oracle(0).requires_grad_(True))

    samples = AudioDecoder(config, weights, "cpu").decode(torch.randn(2, 8, 4, requires_grad=True))

    assert not samples.requires_grad


@pytest.mark.filterwarnings(f"ignore:{WEIGHT_NORM_WARNING}:FutureWarning")
def test_folded_weights_have_the_bits_of_torch_weight_norm() -> None:
    conv = torch.nn.utils.weight_norm(torch.nn.ConvTranspose1d(6, 4, 5))
    conv.weight_g.data.mul_(1.7)
    state = {f"up.{name}": tensor.detach() for name, tensor in conv.state_dict().items()}

    folded = fold_weight_norm(state)

    conv(torch.zeros(1, 6, 2))  # the hook recomputes `weight`
    assert sorted(folded) == ["up.bias", "up.weight"]
    assert torch.equal(folded["up.weight"], conv.weight)
    # Norm over all dims but the first, which is the input channel of a transposed convolution.
    by_hand = (
        state["up.weight_g"] * state["up.weight_v"] / state["up.weight_v"].norm(dim=(1, 2), keepdim=True)
    )
    torch.testing.assert_close(folded["up.weight"], by_hand, rtol=1e-6, atol=1e-7)


def test_convolutions_run_without_tf32_and_flags_come_back() -> None:
    cudnn = torch.backends.cudnn
    before = (cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark)

    with exact_convolutions(), exact_convolutions():
        inside = (cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark)

    assert inside == (False, True, False)
    assert (cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark) == before
