"""Environment variables that torch, Megatron and vLLM read when they are imported; set before that (torch reads none at import), and only
where the user has not.
"""

from __future__ import annotations

import os

import torch

from megagrpo.config.schema import Config

_EVERYWHERE = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",  # a forked tokenizer thread pool would deadlock
}
_ON_CPU = {
    "TORCHDYNAMO_DISABLE": "1",  # compiling costs vLLM's first generate up to 30 s and gains nothing there
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines share the cores
}
_ON_GPU = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}  # Megatron orders communication before compute by it


def prepare_environment(config: Config) -> None:
    """Set the variables for the device that the run will use."""
    on_gpu = config.trainer.device != "cpu" and torch.cuda.is_available()
    for name, value in {**_EVERYWHERE, **(_ON_GPU if on_gpu else _ON_CPU)}.items():
        os.environ.setdefault(name, value)
