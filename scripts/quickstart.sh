#!/usr/bin/env bash
# Installs into .venv and trains the demo: 2 processes, Megatron tensor parallel 2, vLLM on both ranks. Arguments go to train_grpo.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export VENV=${VENV:-.venv}
bash scripts/install.sh
unset VIRTUAL_ENV PYTHONPATH
# Two processes, but no more than there are GPUs where the GPU build was installed.
gpus=$({ nvidia-smi --list-gpus 2> /dev/null || true; } | wc -l)
if [ "$gpus" = 1 ] && [ "${EXTRA:-gpu}" = gpu ]; then processes=1; else processes=2; fi
case $VENV in /*) python=$VENV/bin/python ;; *) python=$PWD/$VENV/bin/python ;; esac
PYTHON=$python NPROC_PER_NODE=${NPROC_PER_NODE:-$processes} exec bash scripts/train_grpo.sh "$@"
