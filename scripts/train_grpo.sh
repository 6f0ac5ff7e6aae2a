#!/usr/bin/env bash
''':'
# Valid bash and valid Python, because torchrun starts what it is given with Python:
#     torchrun --nproc_per_node 8 scripts/train_grpo.sh [--config FILE]... [section.key=value]...
#     bash scripts/train_grpo.sh ...      checks the configuration, then starts torchrun on this same file
# To Python, everything down to the closing quotes is one string. --help has the rest.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

python=${PYTHON:-}
if [[ -z $python ]]; then
    python=python3
    [[ -z ${VIRTUAL_ENV:-} && -x $root/.venv/bin/python ]] && python=$root/.venv/bin/python
fi

if [[ -z ${NPROC_PER_NODE:-} ]]; then
    if [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
        NPROC_PER_NODE=$(tr ',' '\n' <<< "$CUDA_VISIBLE_DEVICES" | wc -l)
    else
        NPROC_PER_NODE=$(nvidia-smi --list-gpus 2> /dev/null | wc -l) || true
    fi
    [[ $NPROC_PER_NODE -gt 0 ]] || NPROC_PER_NODE=1
fi
NNODES=${NNODES:-1}
for count in "$NPROC_PER_NODE" "$NNODES"; do
    if ! [[ $count =~ ^[1-9][0-9]*$ ]]; then
        echo "NPROC_PER_NODE=$NPROC_PER_NODE and NNODES=$NNODES must be whole numbers" >&2
        exit 2
    fi
done

if [[ $NNODES -eq 1 ]]; then
    rendezvous=(--standalone)
elif [[ -n ${RDZV_ENDPOINT:-} ]]; then
    rendezvous=(--rdzv_backend c10d --rdzv_endpoint "$RDZV_ENDPOINT" --rdzv_id "${RDZV_ID:-megagrpo}")
elif [[ -n ${MASTER_ADDR:-} && -n ${NODE_RANK:-} ]]; then
    rendezvous=(--node_rank "$NODE_RANK" --master_addr "$MASTER_ADDR" --master_port "${MASTER_PORT:-29500}")
else
    echo "NNODES=$NNODES needs RDZV_ENDPOINT=host:port, or MASTER_ADDR and NODE_RANK, in the environment of every node" >&2
    exit 2
fi

dry() { WORLD_SIZE=$((NPROC_PER_NODE * NNODES)) LOCAL_WORLD_SIZE=$NPROC_PER_NODE "$python" "${BASH_SOURCE[0]}" "$@"; }
for argument in "$@"; do
    case $argument in -h | --help | --dry-run | --check) dry "$@"; exit ;; esac
done
dry --check "$@"

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$python" -m torch.distributed.run --nnodes "$NNODES" --nproc_per_node "$NPROC_PER_NODE" "${rendezvous[@]}" "${BASH_SOURCE[0]}" "$@"
'''

if __name__ == "__main__":  # spawned workers run this file again, under another name
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    try:
        from megagrpo.cli import main
    except ModuleNotFoundError as error:
        sys.exit(f"{error.name} is not installed in {sys.executable}: `bash scripts/quickstart.sh` installs everything into .venv")
    sys.exit(main())
