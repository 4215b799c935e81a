"""The video VAE as the pipeline sees it; encoder and decoder share nothing but tiling and the pixel convention."""

from __future__ import annotations

from runtime.families.minimax_h3.model.video_decoder import VideoDecoder
from runtime.families.minimax_h3.model.video_encoder import VideoEncoder, encode_frames, encode_keyframe
from runtime.families.minimax_h3.model.video_vae_pixels import to_uint8

__all__ = ["VideoDecoder", "VideoEncoder", "encode_frames", "encode_keyframe", "to_uint8"]
