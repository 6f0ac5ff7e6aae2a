"""A run that cannot go on ends soon, on all ranks, with one message that says where; nothing of it stays behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

ROOT = Path(__file__).parents[2]


def start(out: Path, *settings: str) -> subprocess.Popen:
    """The demo on two ranks, in a session (of processes) of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(ROOT / "scripts/train_grpo.sh")]
    arguments = [f"trainer.runs_dir={out}", "trainer.name=run", "trainer.total_steps=500", "evaluation.every_n_steps=0", *settings]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*command, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def wait_for_phase(board: Path, phase: str) -> int:
    """The process id of the rank whose line this is, as soon as it says that phase."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        words = board.read_text().split() if board.exists() else []
        if phase in words:
            return int(words[0])
        time.sleep(0.001)
    pytest.fail(f"{board} never said {phase}")


def processes_of_session(session_id: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session_id and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


@pytest.mark.parametrize("phase", ["starting", "gen", "reward", "update_actor", "update_weights"])
def test_killed_rank_ends_the_job(phase, tmp_path):
    job = start(tmp_path)
    os.kill(wait_for_phase(tmp_path / "run/logs/attempt_1/phases/rank_1", phase), signal.SIGKILL)
    killed_at = time.monotonic()
    output, _ = job.communicate(timeout=60)
    assert time.monotonic() - killed_at < 60
    assert job.returncode != 0
    assert "rank 1 (process" in output and "died in step" in output, output[-3000:]
    assert processes_of_session(job.pid) == []


def test_reward_function_that_always_raises_stops_the_run(tmp_path):
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def broken(response, **columns):\n    raise KeyError('no such column')\n")
    job = start(tmp_path, f"reward.functions={{'{rewards}:broken': 1.0}}")
    output, _ = job.communicate(timeout=120)
    assert job.returncode != 0
    assert "reward function broken failed in" in output and "KeyError" in output
    assert output.count("reward.max_failure_fraction") == 1, "one message, from one rank"
    assert processes_of_session(job.pid) == []


def test_empty_dataset_is_one_clear_message(tmp_path):
    data = tmp_path / "empty.jsonl"
    data.write_text("")
    job = start(tmp_path, f"data.train_files={data}")
    output, _ = job.communicate(timeout=120)
    assert job.returncode != 0
    assert str(data) in output
    assert "Traceback" not in output.split("torch/distributed")[0]
    assert processes_of_session(job.pid) == []
