"""What a run measures and writes: times add up, metrics equal hand-worked numbers, files survive kills and full disks."""

import json
import logging
import math
import sys
import time

import numpy as np
import pytest

from megagrpo.config.schema import Config
from megagrpo.observability.jsonl import JsonlFile, LogWriteError, read_jsonl
from megagrpo.observability.metrics import sample_metrics, speed_metrics
from megagrpo.observability.rollout_log import rollout_rows, write_rollouts
from megagrpo.observability.timers import StepTimer
from megagrpo.observability.trackers import Trackers
from megagrpo.types import Prompt, Sample

JSONL_ONLY = Config.model_validate({"logging": {"trackers": []}})


def sample(number, *, group, reward, length, finish="stop", parts=None):
    return Sample(
        id=number,
        group=group,
        prompt_id=70 + group,
        prompt_ids=np.arange(3 + group, dtype=np.int32),
        response_ids=np.arange(length, dtype=np.int32),
        rollout_logprobs=None,
        finish_reason=finish,
        reward=reward,
        reward_parts=parts or {"math_answer": reward},
    )


def test_phases_and_the_rest_add_up_to_the_step():
    timer = StepTimer()
    started = time.perf_counter()
    with timer.phase("gen"):
        time.sleep(0.02)
    time.sleep(0.01)
    with timer.phase("reward"):
        time.sleep(0.01)
    with timer.phase("gen"):
        time.sleep(0.02)
    seconds = timer.finish_step()
    elapsed = time.perf_counter() - started
    assert set(seconds) == {"timing_s/gen", "timing_s/reward", "timing_s/unaccounted", "timing_s/step"}
    assert seconds["timing_s/gen"] >= 0.04 and seconds["timing_s/reward"] >= 0.01 and seconds["timing_s/unaccounted"] >= 0.01
    step = seconds.pop("timing_s/step")
    assert step == pytest.approx(sum(seconds.values())) and 0.06 <= step <= elapsed + 0.001


def test_a_phase_inside_another_is_not_counted_twice():
    timer = StepTimer()
    with timer.phase("update_actor"):
        with timer.phase("offload"):
            time.sleep(0.03)
            assert timer.current == "offload"
        assert timer.current == "update_actor"
    seconds = timer.finish_step()
    assert seconds["timing_s/offload"] >= 0.03 > seconds["timing_s/update_actor"]
    assert timer.finish_step().keys() == {"timing_s/unaccounted", "timing_s/step"}, "the next step starts empty"


def test_the_device_is_waited_for_inside_the_phase():
    timer = StepTimer(synchronize=lambda: time.sleep(0.03))
    with timer.phase("gen"):
        pass
    assert timer.finish_step()["timing_s/gen"] >= 0.03


def test_after_a_failure_the_phase_is_known():
    timer = StepTimer()
    with pytest.raises(RuntimeError), timer.phase("gen"):
        raise RuntimeError("the engine died")
    assert timer.current == "gen"


def test_sample_metrics_by_hand():
    samples = [
        sample(0, group=0, reward=1.0, length=2, parts={"math_answer": 1.0, "format": 0.0}),
        sample(1, group=0, reward=0.0, length=4, finish="length", parts={"math_answer": 0.0, "format": 0.0}),
        sample(2, group=1, reward=0.5, length=6, parts={"math_answer": 0.0, "format": 1.0}),
        sample(3, group=1, reward=0.5, length=8, parts={"math_answer": 0.0, "format": 1.0}),
    ]
    metrics = sample_metrics(samples, np.array([0.7, -0.7, 0.0, 0.4]))
    expected = {
        "reward/mean": 0.5,
        "reward/max": 1.0,
        "reward/min": 0.0,
        "reward/std": math.sqrt(0.5) / 2,  # of 1 and 0 the sample standard deviation is sqrt(0.5), of 0.5 and 0.5 it is 0
        "reward/frac_zero_std": 0.5,
        "critic/rewards/mean": 0.5,
        "reward/math_answer/mean": 0.25,
        "reward/format/mean": 0.5,
        "advantage/mean": 0.1,
        "advantage/max": 0.7,
        "advantage/min": -0.7,
        "critic/advantages/mean": 0.1,
        "critic/advantages/max": 0.7,
        "critic/advantages/min": -0.7,
        "response_length/mean": 5.0,
        "response_length/max": 8.0,
        "response_length/min": 2.0,
        "response_length/clip_ratio": 0.25,
        "prompt_length/mean": 3.5,
        "prompt_length/max": 4.0,
        "prompt_length/min": 3.0,
    }
    assert metrics == pytest.approx(expected)


def test_speed_is_per_device():
    metrics = speed_metrics(step_seconds=2.0, num_tokens=800, num_devices=4)
    assert metrics == {"perf/time_per_step": 2.0, "perf/total_num_tokens": 800.0, "perf/throughput": 100.0}


def test_metrics_file_has_one_object_a_step_and_no_nan(tmp_path, caplog):
    trackers = Trackers(tmp_path, JSONL_ONLY)
    trackers.log(1, {"reward/mean": 0.25, "actor/grad_norm": float("inf"), "mismatch/kl": float("nan"), "perf/count": np.float32(2)})
    assert read_jsonl(tmp_path / "metrics.jsonl") == [{"step": 1, "reward/mean": 0.25, "perf/count": 2.0}], "on disk before close"
    trackers.log(2, {"reward/mean": 0.5})
    trackers.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "step 1" in warning and "actor/grad_norm=inf" in warning and "mismatch/kl=nan" in warning


def test_a_killed_run_leaves_whole_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "rew')
    assert read_jsonl(path) == [{"step": 1}]
    file = JsonlFile(path)
    file.append({"step": 2})
    file.close()
    assert read_jsonl(path) == [{"step": 1}, {"step": 2}]


def test_a_full_disk_is_one_clear_message(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    trackers = Trackers(tmp_path, JSONL_ONLY)
    with pytest.raises(LogWriteError, match=r"cannot write .*metrics\.jsonl: No space left on device; .*trainer\.runs_dir"):
        trackers.log(1, {"reward/mean": 0.5})
    trackers.close()


def test_tensorboard_has_the_scalars(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = Trackers(tmp_path, Config())
    for step in (1, 2):
        trackers.log(step, {"reward/mean": step / 4})
    trackers.close()
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]


def test_wandb_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"wandb, which is not installed; pip install 'megagrpo\[wandb\]'"):
        Trackers(tmp_path, Config.model_validate({"logging": {"trackers": ["wandb"]}}))


def test_rollouts_are_written_one_row_a_sample(tmp_path):
    prompts = [Prompt(id=70, text="1+1=\n", token_ids=[1], columns={}), Prompt(id=71, text="2+2=", token_ids=[2], columns={})]
    samples = [sample(0, group=0, reward=1.0, length=2), sample(1, group=1, reward=float("nan"), length=4, finish="length")]
    texts = ["2", "\ud83d \u5341 \x1b[31m"]
    rows = rollout_rows(samples, step=12, prompts=prompts, responses=texts, advantages=np.array([0.5, -0.5]))
    path = write_rollouts(tmp_path, rows)
    assert path == tmp_path / "rollouts" / "step_000012.jsonl"
    first, second = read_jsonl(path)
    assert first == {
        "step": 12,
        "prompt_id": 70,
        "group": 0,
        "prompt": "1+1=\n",
        "response": "2",
        "reward": 1.0,
        "reward_parts": {"math_answer": 1.0},
        "advantage": 0.5,
        "finish_reason": "stop",
        "num_prompt_tokens": 3,
        "num_response_tokens": 2,
    }
    assert second["reward"] is None and second["reward_parts"] == {"math_answer": None}, "JSON has no NaN"
    assert second["response"] == "\ud83d \u5341 \x1b[31m", "any text survives, a lone surrogate too"
