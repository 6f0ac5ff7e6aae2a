#!/usr/bin/env bash
# Installs into .venv and trains the demo: 2 processes, Megatron tensor parallel 2, vLLM on both ranks. Arguments go to train_grpo.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/install.sh
unset VIRTUAL_ENV PYTHONPATH
PYTHON=$PWD/.venv/bin/python NPROC_PER_NODE=${NPROC_PER_NODE:-2} exec bash scripts/train_grpo.sh "$@"
