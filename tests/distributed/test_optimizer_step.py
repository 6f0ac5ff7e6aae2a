"""An optimizer step equals torch's; one whose gradients are not finite anywhere changes nothing on any rank; the schedule's rates."""

import json

from torchrun import run_workers


def case(model="qwen2", *, dtype="float32", optimizer="adam", distributed=False, **actor):
    return {"model": model, "dtype": dtype, "optimizer": optimizer, "actor": {"use_distributed_optimizer": distributed, **actor}}


CASES = {
    "dp2": case(),
    "dp2-distributed": case(distributed=True),
    "dp2-bf16": case(dtype="bfloat16"),
    "dp2-bf16-distributed": case(dtype="bfloat16", distributed=True),
    "dp2-sgd": case(optimizer="sgd"),
    "dp2-sgd-bf16": case(optimizer="sgd", dtype="bfloat16"),
    "tp2": case(tensor_model_parallel_size=2),
    "pp2-bf16-distributed": case(dtype="bfloat16", distributed=True, pipeline_model_parallel_size=2),
    "ep2": case("qwen3-moe", expert_model_parallel_size=2),
    "ep2-distributed": case("qwen3-moe", distributed=True, expert_model_parallel_size=2),
}


def test_steps_schedule_and_skips(tiny_models, tmp_path):
    plan = {"models": {name: str(path) for name, path in tiny_models.items()}, "cases": CASES}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    run_workers("optimizer_worker.py", tmp_path / "plan.json", num_processes=2)
