"""scripts/train_grpo.sh as bash, as Python and under torchrun: help, mistakes and dry runs need no torch and leave no traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts/train_grpo.sh"
LAUNCHERS = {"python": [sys.executable, str(SCRIPT)], "bash": ["bash", str(SCRIPT)]}
_OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_", "NPROC_PER_NODE", "NNODES", "NODE_RANK", "RDZV_", "CUDA_VISIBLE_DEVICES")


def launch(command: list[str], *, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not any(part in name for part in _OF_A_LAUNCHER)}
    return subprocess.run(
        command, cwd=cwd, env=inherited | {"PYTHON": sys.executable} | environment, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_help_lists_every_section(launcher, tmp_path):
    done = launch([*LAUNCHERS[launcher], "--help"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: torchrun")
    assert "actor.tensor_model_parallel_size=1" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_mistakes_end_with_one_message_and_status_2(launcher):
    done = launch([*LAUNCHERS[launcher], "optimizer.lr=fast", "actor.tensor_model_paralel_size=2"])
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("The configuration has 2 problems:")
    assert "did you mean actor.tensor_model_parallel_size" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_what_does_not_fit_ends_before_anything_loads(launcher):
    done = launch([*LAUNCHERS[launcher], "rollout.num_samples_per_prompt=1", "data.train_files=no/such.jsonl"])
    assert done.returncode == 2
    assert "no/such.jsonl does not exist" in done.stderr
    assert "makes every advantage zero" in done.stderr
    assert "Traceback" not in done.stderr


def test_torchrun_starts_the_file_and_one_rank_prints_the_mistake():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = launch([*torchrun, str(SCRIPT), "optimizer.lr=fast"])
    assert done.returncode == 1  # torchrun's own, whatever its workers return
    assert done.stderr.count("The configuration has a problem") == 1
    assert "optimizer.lr = fast" in done.stderr


def test_dry_run_under_bash_shows_the_layout_of_all_nodes():
    done = launch([*LAUNCHERS["bash"], "--dry-run"], NPROC_PER_NODE="4", NNODES="2", RDZV_ENDPOINT="localhost:1")
    assert "processes  8" in done.stdout
    assert "actor      TP2 PP2 DP2" in done.stdout
    assert "num_prompts_per_step:" in done.stdout
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["--check"], ["--dry-run"], ["optimizer.lr=fast"]])
def test_neither_torch_nor_vllm_is_imported_before_a_run_starts(arguments):
    code = (
        "import runpy, sys\n"
        f"sys.argv = {[str(SCRIPT), *arguments]!r}\n"
        "try:\n    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit:\n    sys.exit(bool({'torch', 'vllm', 'megatron.core', 'transformers'} & set(sys.modules)))\n"
        "sys.exit('the file did not run')\n"
    )
    done = launch([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr


def test_a_spawned_worker_that_runs_the_file_again_starts_nothing():
    code = f"import runpy, sys\nrunpy.run_path({str(SCRIPT)!r}, run_name='__mp_main__')\nsys.exit('megagrpo' in sys.modules)"
    done = launch([sys.executable, "-W", "error", "-c", code])
    assert done.returncode == 0, done.stderr


@pytest.fixture
def echo_python(tmp_path):
    """A stand-in for the interpreter that prints what it is asked to run."""
    path = tmp_path / "python"
    path.write_text('#!/bin/sh\necho "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "--nnodes 1 --nproc_per_node 1 --standalone"),
        ({"NPROC_PER_NODE": "4"}, "--nnodes 1 --nproc_per_node 4 --standalone"),
        ({"CUDA_VISIBLE_DEVICES": "0,3,5"}, "--nnodes 1 --nproc_per_node 3 --standalone"),
        (
            {"NNODES": "2", "NPROC_PER_NODE": "8", "NODE_RANK": "1", "MASTER_ADDR": "head"},
            "--nnodes 2 --nproc_per_node 8 --node_rank 1 --master_addr head --master_port 29500",
        ),
        (
            {"NNODES": "2", "NPROC_PER_NODE": "8", "RDZV_ENDPOINT": "head:1234", "RDZV_ID": "7"},
            "--nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint head:1234 --rdzv_id 7",
        ),
    ],
)
def test_bash_starts_torchrun_from_the_environment(echo_python, environment, expected):
    if "NPROC_PER_NODE" not in environment and "CUDA_VISIBLE_DEVICES" not in environment:
        environment = environment | {"PATH": "/usr/bin:/bin"}  # without nvidia-smi there is one process
    done = launch([*LAUNCHERS["bash"], "trainer.name=my run"], PYTHON=echo_python, **environment)
    assert done.returncode == 0, done.stderr
    check, start = done.stdout.splitlines()
    assert check == f"{SCRIPT} --check trainer.name=my run"
    assert start == f"-m torch.distributed.run {expected} {SCRIPT} trainer.name=my run"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"NPROC_PER_NODE": "all"}, "NPROC_PER_NODE=all and NNODES=1 must be whole numbers"),
        ({"NNODES": "2", "NPROC_PER_NODE": "1"}, "NNODES=2 needs RDZV_ENDPOINT=host:port, or MASTER_ADDR and NODE_RANK"),
    ],
)
def test_bash_refuses_an_incomplete_environment(environment, expected):
    done = launch(LAUNCHERS["bash"], **environment)
    assert done.returncode == 2
    assert expected in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(("world_size", "expected"), [("8", "no RANK"), ("x", "not a number of processes")])
def test_python_refuses_a_half_set_up_world(world_size, expected):
    done = launch(LAUNCHERS["python"], WORLD_SIZE=world_size)
    assert done.returncode == 2
    assert expected in done.stderr


def test_without_the_dependencies_one_line_says_what_to_do():
    done = launch([sys.executable, "-I", "-S", str(SCRIPT)])
    assert done.returncode == 1
    assert "scripts/quickstart.sh" in done.stderr
    assert len(done.stderr.splitlines()) == 1
