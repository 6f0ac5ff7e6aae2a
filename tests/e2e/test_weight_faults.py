"""A tensor that did not arrive, or arrived in the wrong place, is reported by name: faults planted in the real sync."""

import json

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.vllm]


def plant_faults(model, out, *settings: str) -> dict:
    from torchrun import run_workers

    shared = ["model.dtype=float32", "data.val_files=null", "data.max_prompt_length=16", "rollout.max_response_length=16"]
    arguments = [f"model.path={model}", *shared, *settings]
    run_workers("../e2e/fault_worker.py", out, *arguments, num_processes=2)
    return json.loads((out / "report.json").read_text())


def test_dense_faults_are_named(models, tmp_path):
    """Actor in two pipeline stages, one engine over both ranks; the embedding is tied and packed a second time as the head."""
    report = plant_faults(
        models["llama"],
        tmp_path,
        "actor.pipeline_model_parallel_size=2",
        "actor.tensor_model_parallel_size=1",
        "rollout.tensor_parallel_size=2",
    )
    assert report["none"] == 4 * 9 + 2, "every tensor is compared: 9 a layer, embedding and final norm"
    for layer in (0, 1):
        for rank in (0, 1):
            assert f"model.layers.{layer}.mlp.down_proj.weight on rank {rank}" in report["swapped"]
    assert report["swapped"].startswith("4 tensors")
    assert "k_proj" in report["stale_projection"] and report["stale_projection"].startswith("2 tensors")
    assert "model.layers.3.input_layernorm.weight" in report["one_element"]
    assert "model.embed_tokens.weight" in report["embedding"]
    assert "model.embed_tokens.weight" in report["stale_tied_head"]
    assert "model.layers.2.self_attn.qkv_proj.weight (v_proj) (never sent)" in report["never_sent"]


def test_expert_faults_are_named(models, tmp_path):
    report = plant_faults(
        models["qwen3_moe"],
        tmp_path,
        "actor.expert_model_parallel_size=2",
        "actor.tensor_model_parallel_size=1",
        "rollout.tensor_parallel_size=2",
    )
    assert isinstance(report["none"], int)
    assert "model.layers.1.mlp.experts.2 on rank" in report["stale_expert"]
    assert report["stale_expert"].startswith("2 tensors"), "both ranks hold a slice of it"
    assert "experts.routed_experts.w13_weight (1) (never sent)" in report["never_sent"]
