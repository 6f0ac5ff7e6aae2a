"""Whose output goes where: the console gets ours alone, the log file everything, a failing rank is heard."""

import re
import subprocess
import sys
import textwrap

import pytest

from megagrpo.observability.logs import new_attempt

REDIRECTION_PROGRAM = """
import logging, os, subprocess, sys, warnings
from pathlib import Path
from megagrpo.observability.console import RunConsole
from megagrpo.observability.logs import RankLogs, new_attempt
logs = RankLogs(rank=3)
os.write(1, b"early C-level\\n")
logs.open(new_attempt(Path(sys.argv[1])))
console = RunConsole(logs.stdout)
os.write(1, b"C-level stdout\\n")
os.write(2, b"C-level stderr\\n")
sys.stdout.write("Python stdout\\n")
sys.stderr.write("Python stderr\\n")
subprocess.run(["echo", "a child"], check=True)
logging.getLogger("vllm.engine").warning("a library's log")
warnings.warn("a library's warning")
logging.getLogger("megagrpo.trackers").warning("our warning")
console.say("on the console")
logs.stderr.write("on the true stderr\\n")
"""


def run_program(program, *arguments):
    command = [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_only_the_console_reaches_the_terminal(tmp_path):
    ended = run_program(REDIRECTION_PROGRAM, tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "warning: our warning\non the console\n", "on the true stderr\n")
    log = (tmp_path / "logs" / "attempt_1" / "rank_3.log").read_text().splitlines()
    assert log[:6] == ["early C-level", "C-level stdout", "C-level stderr", "Python stdout", "Python stderr", "a child"]
    assert [re.search(text, "\n".join(log[6:])) is not None for text in ("a library's log", "a library's warning", "our warning")] == [
        True
    ] * 3
    assert (tmp_path / "logs" / "latest" / "rank_3.log").exists()


def test_every_attempt_has_its_own_logs(tmp_path):
    for number in range(1, 12):
        assert new_attempt(tmp_path).name == f"attempt_{number}"
        assert (tmp_path / "logs" / "latest").resolve().name == f"attempt_{number}"


FAILURE_PROGRAM = """
import sys
from pathlib import Path
from megagrpo.observability.jsonl import JsonlFile
from megagrpo.observability.logs import RankLogs
from megagrpo.observability.report import read_metrics
from megagrpo.observability.timers import StepTimer
run, rank, fault = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
logs, timer = RankLogs(rank=rank), StepTimer()
logs.open(run)
try:
    with timer.phase("gen"):
        exec(fault)
except Exception as error:
    logs.report_failure(error, phase=timer.current)
    sys.exit(1)
"""


def test_a_crash_is_told_once_with_rank_phase_and_traceback(tmp_path):
    ended = run_program(FAILURE_PROGRAM, tmp_path, 1, "1 / 0")
    assert ended.returncode == 1 and ended.stdout == ""
    assert "Traceback" in ended.stderr and "ZeroDivisionError: division by zero" in ended.stderr
    assert re.search(rf"rank 1 on \S+ failed in gen; logs of all ranks: {tmp_path}$", ended.stderr.strip())

    late = run_program(FAILURE_PROGRAM, tmp_path, 0, "raise RuntimeError('connection closed by peer')")
    assert (late.returncode, late.stderr) == (1, ""), "what follows from a failure must not bury it"
    assert "connection closed by peer" in (tmp_path / "rank_0.log").read_text()
    assert "connection closed" not in (tmp_path / "failure.txt").read_text()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("JsonlFile(Path('/dev/full')).append({})", "error: cannot write /dev/full: No space left on device; make room"),
        ("Path('/dev/full').write_text('x')", "error: [Errno 28] No space left on device"),
        ("read_metrics(Path('nowhere'))", "error: nowhere has no metrics.jsonl: name the directory of a run"),
    ],
)
def test_what_the_user_can_mend_comes_without_traceback(tmp_path, fault, message):
    ended = run_program(FAILURE_PROGRAM, tmp_path, 0, fault)
    assert ended.stderr.startswith(message) and "Traceback" not in ended.stderr and "rank 0" in ended.stderr
    assert "Traceback" in (tmp_path / "rank_0.log").read_text()


def test_a_librarys_value_error_keeps_its_traceback(tmp_path):
    assert "Traceback" in run_program(FAILURE_PROGRAM, tmp_path, 0, "import math; math.sqrt(-1)").stderr
