"""A small MiniMax-H3 configuration for tests that need sizes but no weights."""

from __future__ import annotations

from runtime.families.minimax_h3.config import (
    AudioVAEConfig,
    H3Config,
    ImageProcessorConfig,
    SpecialTokens,
    TextConfig,
    TransformerConfig,
    VideoVAEConfig,
    VisionConfig,
)


def small_config(
    *,
    vocab_size: int = 151_936,
    tokens: SpecialTokens | None = None,
    image_processor: ImageProcessorConfig | None = None,
) -> H3Config:
    """Released geometry (patches, ratios, rates) around tiny widths."""
    return H3Config(
        transformer=TransformerConfig(2, 32, 48, 2, 1, 96, 4, 8, (1, 2, 2), 40, 16, 48, 24, 4),
        text=TextConfig(vocab_size, 40, 64, 52, 4, 2, 16, 1e-6, 5e6, (4, 2, 2)),
        vision=VisionConfig(3, 32, 48, 2, 16, 2, 2, 40, 64, (0, 1, 2)),
        tokens=tokens or SpecialTokens(151_655, 151_656, 151_652, 151_653),
        image_processor=image_processor or ImageProcessorConfig(),
        video_vae=VideoVAEConfig(
            3, 3, 4, (32, 32, 32, 32), 1, (2, 2, 2, 2), (1, 2, 2, 1), 32, 1e-6, "reflect", 2, 2, 32, 4, 2, 100.0,
            0.75, 1e-5, 17, 3, (0.1,) * 4, (1.5,) * 4,
        ),
        audio_vae=AudioVAEConfig(4, (2, 2), 32, 8, 2, 16, (2, 2), (4, 4), (3,), ((1, 3),), 160, (0.0,) * 8, (1.0,) * 8),
    )  # fmt: skip
