"""Any actor layout against any rollout layout, on real Megatron and real vLLM: the same samples, and the weights that were trained."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

PROMPT_TEXTS = ["12+34=", "7+5=", "99+1=", "40+41=", "3+3="]
DENSE = {
    "1": (1, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "dp2": (2, {}),
    "tp2pp2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
}
EXPERTS = {
    "1": (1, {}),
    "ep2": (2, {"expert_model_parallel_size": 2}),
    "etp2": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": "true", "expert_tensor_parallel_size": 2}),
}


def run(model: Path, out: Path, *, num_processes: int, actor: dict, rollout: dict) -> dict:
    """One worker run; returns its report."""
    from torchrun import run_workers

    out.mkdir()
    data = out / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": text, "answer": "0"}) + "\n" for text in PROMPT_TEXTS))
    settings = {
        "model.path": model,
        "model.dtype": "float32",
        "data.train_files": data,
        "data.val_files": "null",
        "data.shuffle": "false",
        "data.max_prompt_length": 16,
        "rollout.num_prompts_per_step": len(PROMPT_TEXTS),
        "rollout.num_samples_per_prompt": 3,
        "rollout.max_response_length": 16,
        "optimizer.lr": 0.01,
        "optimizer.lr_warmup_steps": 0,
        "algorithm.kl_coef": 0.1,
        "actor.tensor_model_parallel_size": 1,
        **{f"actor.{name}": value for name, value in actor.items()},
        **{f"rollout.{name}": value for name, value in rollout.items()},
    }
    run_workers("../e2e/rollout_worker.py", out, *(f"{k}={v}" for k, v in settings.items()), num_processes=num_processes)
    return json.loads((out / "report.json").read_text())


@pytest.fixture(scope="module")
def references(models, tmp_path_factory) -> dict[str, dict]:
    """Reports of one-process runs."""
    root = tmp_path_factory.mktemp("references")
    return {
        name: run(models[name], root / name, num_processes=1, actor={}, rollout={}) | {"dir": root / name}
        for name in ("llama", "qwen2", "qwen3_moe")
    }


def assert_same(report: dict, reference: dict) -> None:
    """The same samples from the same weights, before and after the same update."""
    assert report["sampled"].keys() == reference["sampled"].keys(), "every prompt is answered exactly once"
    for sample_id, sample in reference["sampled"].items():
        assert report["sampled"][sample_id]["tokens"] == sample["tokens"], f"sample {sample_id}"
        np.testing.assert_allclose(report["sampled"][sample_id]["logprobs"], sample["logprobs"], atol=1e-4)
    for greedy in report["greedy"]:  # whatever the size of the sync's buckets
        for sample_id, sample in reference["greedy"][0].items():
            assert greedy[sample_id]["tokens"] == sample["tokens"], f"greedy sample {sample_id} after the update"
    assert report["metrics"]["mismatch/logprob_diff_max"] < 1e-4
    assert report["metrics"]["actor/grad_norm"] == pytest.approx(reference["metrics"]["actor/grad_norm"], rel=1e-4)


@pytest.mark.parametrize("rollout_tp", [1, 2])
@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2", "tp2pp2"])
def test_dense_layouts(layout, rollout_tp, models, references, tmp_path):
    num_processes, actor = DENSE[layout]
    model = "llama" if layout in ("tp2", "tp2pp2") else "qwen2"
    report = run(models[model], tmp_path / "run", num_processes=num_processes, actor=actor, rollout={"tensor_parallel_size": rollout_tp})
    assert_same(report, references[model])


@pytest.mark.parametrize(
    ("layout", "rollout"),
    [
        ("ep2", {"tensor_parallel_size": 1}),
        ("ep2", {"tensor_parallel_size": 2}),
        ("ep2", {"tensor_parallel_size": 2, "enable_expert_parallel": "true"}),
        ("etp2", {"tensor_parallel_size": 2}),
    ],
)
def test_expert_layouts(layout, rollout, models, references, tmp_path):
    num_processes, actor = EXPERTS[layout]
    report = run(models["qwen3_moe"], tmp_path / "run", num_processes=num_processes, actor=actor, rollout=rollout)
    assert_same(report, references["qwen3_moe"])


@pytest.mark.parametrize("model", ["llama", "qwen2", "qwen3_moe"])
def test_synced_engine_equals_a_fresh_one_of_the_export(model, references, tmp_path):
    """Greedy tokens and log-probabilities after training and syncing are those of a vLLM started from the exported folder."""
    from transformers import AutoTokenizer

    from megagrpo.demo import MODEL_DIR

    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    out = tmp_path / "fresh.json"
    prompts = [tokenizer(text)["input_ids"] for text in PROMPT_TEXTS]
    fresh = [
        sys.executable,
        str(Path(__file__).with_name("fresh_engine.py")),
        str(references[model]["dir"] / "hf"),
        json.dumps(prompts),
        str(out),
    ]
    subprocess.run(fresh, check=True, capture_output=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    for sample_id, expected in enumerate(json.loads(out.read_text())):
        synced = references[model]["greedy"][-1][str(sample_id)]
        assert synced["tokens"] == expected["tokens"]
        np.testing.assert_allclose(synced["logprobs"], expected["logprobs"], atol=1e-5)


def test_on_policy_start_is_exact(references):
    """Before the first update the ratio is 1 and the policy is the reference: no clipping, no divergence, exactly."""
    for reference in references.values():
        assert reference["metrics"]["actor/kl_loss"] == 0
        for metrics in (reference["metrics"], reference["explicit_old"]):  # with the update's own log-probabilities, and a pass before
            assert metrics["actor/ppo_kl"] == 0
            assert metrics["actor/pg_clipfrac_low"] == 0 and metrics["actor/pg_clipfrac_high"] == 0


def test_a_bucket_bounds_the_memory_of_a_sync(references):
    """No bucket is larger than asked for, unless one parameter is (of which q, k and v, or gate and up, are parts)."""
    for reference in references.values():
        buckets = reference["buckets"]
        assert all(num_bytes <= 100_000 or len(names) <= 3 for names, num_bytes in buckets)
        assert len(buckets) > 3, "the model does not fit into one"
        names = [name for names, _ in buckets for name in names]
        assert len(names) == len(set(names))


def test_samples_of_one_prompt_differ(references):
    sampled = references["llama"]["sampled"]
    for group in range(len(PROMPT_TEXTS)):
        answers = [sampled[str(3 * group + i)]["tokens"] for i in range(3)]
        assert len({tuple(answer) for answer in answers}) > 1
