"""MiniMax-H3: joint video and audio diffusion transformer with a Qwen3-VL conditioner."""
