"""What the user sees: panels, step lines, signs of life, summary and curve."""

import io
import logging
import re
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest

from megagrpo.config.schema import Config
from megagrpo.observability import report
from megagrpo.observability.console import RunConsole, phase_words
from megagrpo.observability.rollout_log import RolloutRow
from megagrpo.observability.run_facts import run_facts
from megagrpo.observability.timers import StepTimer
from megagrpo.observability.trackers import Trackers

ROWS = [
    RolloutRow(
        step=12,
        prompt_id=7,
        group=0,
        prompt="1+1=\n",
        response=response,
        reward=reward,
        reward_parts={"math_answer": reward},
        advantage=0.5,
        finish_reason="stop",
        num_prompt_tokens=4,
        num_response_tokens=2,
    )
    for response, reward in (("2", 1.0), ("\u5341 \x1b[31m" + 500 * "x", None))
]
METRICS = {
    "timing_s/step": 34.12,
    "reward/mean": 0.482,
    "response_length/mean": 612.3,
    "actor/pg_loss": -0.0123,
    "actor/kl_loss": 0.0004,
    "actor/entropy": 0.41,
    "actor/pg_clipfrac": 0.008,
    "actor/grad_norm": 0.62,
    "mismatch/prob_diff_mean": 0.0021,
    "perf/throughput": 9800.0,
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def console():
    made = RunConsole(io.StringIO())
    yield made
    ours = logging.getLogger("megagrpo")
    for handler in list(ours.handlers):
        ours.removeHandler(handler)


def printed(console):
    return console._console.file.getvalue()


def test_step_line_is_one_plain_line(console):
    console.step_line(11, 200, {"reward/mean": 0.451})
    console.step_line(12, 200, METRICS)
    first, second = printed(console).splitlines()
    assert first == "step  11/200 | reward 0.451"
    assert second == (
        "step  12/200 |  34.1s | reward 0.482 (+0.031) | len 612 | loss -0.0123 | kl 0.0004 | ent 0.41 | clip 0.8% | grad 0.62"
        " | mismatch 0.0021 | 9.8k tok/s/device"
    )


def test_a_terminal_gets_colour_unless_no_color(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")

    def shown():
        stream = Terminal()
        RunConsole(stream).step_line(1, 2, {**METRICS, "mismatch/prob_diff_mean": 0.02})
        return stream.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[31mmismatch 0.0200" in shown(), "a suspicious value is red"
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[3\dm", shown())


def test_other_ranks_are_silent():
    stream = io.StringIO()
    quiet = RunConsole(stream, quiet=True)
    with quiet.watch(lambda: "starting", every_s=0.01):
        time.sleep(0.05)
    quiet.step_line(1, 2, METRICS)
    quiet.sample_table(ROWS)
    assert stream.getvalue() == ""


def test_long_phases_show_signs_of_life(console):
    timer = StepTimer()
    with console.watch(lambda: phase_words(timer.current), every_s=0.05), timer.phase("starting vLLM"):
        time.sleep(0.3)
    lines = printed(console).splitlines()
    assert len(lines) >= 2 and set(lines) == {"starting vLLM (0 s)"}
    time.sleep(0.1)
    assert printed(console).splitlines() == lines, "nothing is printed once it is over"


def test_live_line_leaves_sys_stdout_alone(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")

    stream, before = Terminal(), (sys.stdout, sys.stderr)
    with RunConsole(stream).watch(lambda: phase_words("gen"), every_s=1):
        time.sleep(0.4)
        assert (sys.stdout, sys.stderr) == before
    assert "generating (0 s)" in stream.getvalue() and stream.getvalue().isascii()


def test_sample_rows_cannot_break_the_console(console):
    console.sample_table(ROWS)
    first, second = printed(console).splitlines()
    assert first == r"sample | reward 1.00, math_answer 1.00, advantage 0.50 | 1+1=\n -> 2"
    assert second.startswith("sample | reward none") and "\x1b" not in second and r"\x1b[31m" in second
    assert second.endswith("x...") and len(second) < 500


def test_sample_table_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    RunConsole(stream).sample_table(ROWS)
    assert "prompt" in stream.getvalue() and r"1+1=\n" in stream.getvalue() and "\x1b[31m" not in stream.getvalue()


def test_evaluation_line(console):
    console.evaluation_line(20, {"val-core/demo/acc/mean@1": 0.5, "timing_s/testing": 1.0})
    assert printed(console) == "evaluation after step 20 | demo/acc/mean@1 0.500\n"


def test_start_panel_names_model_layout_and_kernels(console, tmp_path):
    config = Config.model_validate({"actor": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}})
    facts = run_facts(
        config,
        world_size=8,
        num_parameters=1_310_000,
        device_name="CPU",
        fusions={"apply_rope_fusion": False, "bias_activation_fusion": True},
        run_dir=tmp_path,
    )
    console.start_panel(facts)
    text = printed(console)
    for words in ("demo, 1.3M parameters, bfloat16", "TP2 PP2 DP2", "8 engines of TP1", "8 x CPU", "196,608 a step", "torch 2."):
        assert words in text, words
    assert re.search(r"fusions +bias_activation_fusion\n", text) and str(tmp_path) in text and text.isascii()


def test_our_own_warnings_are_shown(console):
    logging.getLogger("megagrpo.observability.trackers").warning("look here")
    logging.getLogger("vllm").warning("chatter")
    assert printed(console) == "warning: look here\n"


def write_run(run_dir, *, num_steps):
    trackers = Trackers(run_dir, Config.model_validate({"logging": {"trackers": []}}))
    trackers.log(0, {"val-core/demo/acc/mean@1": 0.3})
    for step in range(1, num_steps + 1):
        times = {"timing_s/gen": 3.0, "timing_s/update_actor": 1.0, "timing_s/unaccounted": 0.0, "timing_s/step": 4.0}
        mismatch = {"mismatch/prob_diff_mean": 0.001 * step, "mismatch/prob_diff_max": 0.01 * step}
        trackers.log(step, {"reward/mean": step / num_steps, "response_length/mean": 5.0, **times, **mismatch})
    trackers.log(num_steps, {"val-core/demo/acc/mean@1": 0.8})
    trackers.close()


def test_summary_and_its_panel(tmp_path, console):
    write_run(tmp_path, num_steps=4)
    summary = report.summarise(tmp_path)
    assert summary == report.RunSummary(
        num_steps=4,
        seconds=16.0,
        first_reward=0.25,
        last_reward=1.0,
        accuracies={"demo/acc/mean@1": (0.3, 0.8)},
        time_split={"gen": 0.75, "update_actor": 0.25, "unaccounted": 0.0},
    )
    console.summary(summary, run_dir=tmp_path, curve=tmp_path / "curve.png", next_steps=["try this", "or that"])
    text = printed(console)
    for words in ("0.250 in the first step, 1.000 in the last", "0.300 before, 0.800 after", "gen 75%, update_actor 25%\n", "curve.png"):
        assert words in text, words
    assert text.endswith("next: try this\n      or that\n")


@pytest.mark.parametrize("num_steps", [1, 60])
def test_curve_is_a_picture(tmp_path, num_steps):
    from matplotlib.image import imread

    write_run(tmp_path, num_steps=num_steps)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = report.plot_curve(tmp_path)
    pixels = imread(path)[..., :3]
    assert path.name == "curve.png" and pixels.shape[1] > 1000
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 50, "lines were drawn"


def test_report_by_hand(tmp_path, capsys):
    write_run(tmp_path, num_steps=2)
    assert report.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'curve.png'}\n"
    assert report.main([str(tmp_path / "nowhere")]) == 2
    assert "has no metrics.jsonl" in capsys.readouterr().err


def test_reading_metrics_imports_no_torch():
    program = "import sys, megagrpo.observability.metrics, megagrpo.observability.console; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
