#!/usr/bin/env bash
# Installs into .venv where needed and runs the tests; arguments go to pytest (the fast tier: -m "not slow").
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export VENV=${VENV:-.venv}
bash scripts/install.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$VENV/bin/python" -m pytest "$@"
