"""Runs worker scripts of this folder under torchrun on this machine."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def run_workers(script: str, *args: object, num_processes: int, timeout_s: int = 300, env: dict[str, str] | None = None) -> str:
    """Run tests/distributed/<script> on num_processes ranks and return what they print; a failure fails the test with the end of it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_processes)]
    command += [str(HERE / script), *map(str, args)]
    settings = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        **(env or {}),
    }
    # a session of its own, so that no worker outlives a timeout
    process = subprocess.Popen(
        command, env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{script} still ran after {timeout_s} s; its output ends with\n{output[-6000:]}", pytrace=False)
    if process.returncode != 0:
        pytest.fail(f"{script} ended with {process.returncode}; its output ends with\n{output[-6000:]}", pytrace=False)
    return output
