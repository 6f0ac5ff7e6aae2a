"""megagrpo: GRPO on Megatron-Core with vLLM in the same processes."""

__version__ = "0.1.0"
