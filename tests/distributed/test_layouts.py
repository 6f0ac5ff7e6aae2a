"""Logits, gradients and gradient norm of Megatron in every layout equal those of Hugging Face, one sequence at a time, in fp32.

So layouts agree with each other, packing is exact, and neither the split into micro-batches nor dummies change anything.
"""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tiny_models import make_samples, make_weights
from torchrun import run_workers

TP, PP, VPP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
EP, ETP, SP = "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel"


def case(model, num_micro_batches=4, **actor):
    return {"model": model, "num_micro_batches": num_micro_batches, "actor": {"use_distributed_optimizer": False, **actor}}


CASES = {  # by number of processes; those of one number share a torchrun
    1: {
        "llama": case("llama-tied"),
        "llama-linear-rope": case("llama-linear-rope"),
        "llama-yarn": case("llama-yarn"),
        "mistral": case("mistral"),
        "mixtral": case("mixtral"),
        "qwen2": case("qwen2", num_micro_batches=1),
        "qwen2-windows": case("qwen2-windows"),
        "qwen2-moe": case("qwen2-moe"),
        "qwen2-one-sequence-each": case("qwen2", num_micro_batches=12),
        "qwen2-recompute": case("qwen2", recompute="full"),
        "qwen2-recompute-selective": case("qwen2", recompute="selective"),
        "qwen3": case("qwen3"),
        "moe": case("qwen3-moe"),
        "moe-unnormalised": case("qwen3-moe-unnormalised"),
    },
    2: {
        "llama-tp2": case("llama-tied", **{TP: 2}),
        "qwen3-tp2": case("qwen3", **{TP: 2}),
        "qwen3-tp2-sp": case("qwen3", **{TP: 2, SP: True}),
        "llama-pp2": case("llama-tied", **{PP: 2}),
        "llama-pp2-vpp2": case("llama-tied", **{PP: 2, VPP: 2}),
        "llama-pp2-vpp4": case("llama-8-layers", num_micro_batches=6, **{PP: 2, VPP: 4}),
        "qwen2-pp2-uneven": case("qwen2", num_micro_batches=1, **{PP: 2, "num_layers_in_first_pipeline_stage": 1}),
        "qwen2-dp2": case("qwen2"),
        "qwen2-dp2-dummies": case("qwen2", num_micro_batches=8),
        "qwen2-dp2-distributed-optimizer": case("qwen2", use_distributed_optimizer=True),
        "qwen2-moe-tp2": case("qwen2-moe", **{TP: 2, SP: True}),
        "qwen2-moe-pp2": case("qwen2-moe", **{PP: 2}),
        "mixtral-ep2": case("mixtral", **{EP: 2}),
        "moe-ep2": case("qwen3-moe", **{EP: 2}),
        "moe-ep2-dummies": case("qwen3-moe", num_micro_batches=8, **{EP: 2}),
        "moe-tp2": case("qwen3-moe", **{TP: 2, SP: True}),
        "moe-tp2-etp2": case("qwen3-moe", **{TP: 2, ETP: 2, SP: True}),
    },
    4: {
        "qwen2-tp2-pp2": case("qwen2", **{TP: 2, PP: 2}),
        "qwen3-tp2-pp2-vpp2-sp": case("qwen3", **{TP: 2, PP: 2, VPP: 2, SP: True}),
        "llama-pp4-vpp2": case("llama-8-layers", num_micro_batches=12, **{PP: 4, VPP: 2}),
        "llama-pp4": case("llama-tied", num_micro_batches=6, **{PP: 4}),
        "llama-pp4-fewer-micro-batches": case("llama-tied", num_micro_batches=2, **{PP: 4}),
        "moe-tp2-ep2": case("qwen3-moe", **{TP: 2, EP: 2, SP: True}),
        "moe-tp2-ep2-etp2": case("qwen3-moe", **{TP: 2, EP: 2, ETP: 2, SP: True}),
        "moe-tp2-ep2-distributed-optimizer": case("qwen3-moe", **{TP: 2, EP: 2, SP: True}, use_distributed_optimizer=True),
        "moe-pp2-ep2": case("qwen3-moe", **{PP: 2, EP: 2}),
    },
}
ALL = [(num_processes, name) for num_processes, cases in CASES.items() for name in cases]


@pytest.fixture(scope="module")
def run_layouts(tiny_models, tmp_path_factory):
    """Folder with the results of all cases of a number of processes; they run when first asked for, and fail the test that asked."""
    folders = {}

    def run(num_processes):
        if num_processes not in folders:
            folder = folders[num_processes] = tmp_path_factory.mktemp(f"layouts{num_processes}")
            plan = {"models": {name: str(path) for name, path in tiny_models.items()}, "cases": CASES[num_processes]}
            (folder / "plan.json").write_text(json.dumps(plan))
            run_workers("layout_worker.py", folder / "plan.json", folder, num_processes=num_processes)
        return folders[num_processes]

    return run


@pytest.fixture(scope="module")
def oracle(tiny_models, tmp_path_factory):
    """Hugging Face's logits of every sample, and the gradients of the same loss; once per model."""
    done = {}

    def run(name):
        if name not in done:
            done[name] = hugging_face(tiny_models[name], tmp_path_factory.mktemp(name))
        return done[name]

    return run


def hugging_face(folder, scratch):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    logits, loss = {}, 0.0
    for sample, weight in zip(make_samples(), make_weights(), strict=True):
        prompt, response = (torch.from_numpy(ids).long() for ids in (sample.prompt_ids, sample.response_ids))
        out = model(torch.cat([prompt, response])[None]).logits[0]
        logits[sample.id] = out.detach()
        predicting = out[len(prompt) - 1 : -1]
        loss = loss + weight * torch.nn.functional.cross_entropy(predicting, response, reduction="sum")
    loss.backward()
    return logits, as_in_files(model, scratch)


def as_in_files(model, scratch):
    """Gradients under the names and in the layout of the weights' files, where transformers itself puts them."""
    for parameter in model.parameters():
        parameter.data = parameter.grad
    model.save_pretrained(scratch)
    return load_file(scratch / "model.safetensors")


@pytest.mark.parametrize(("num_processes", "name"), ALL, ids=[name for _, name in ALL])
def test_layout_equals_hugging_face(run_layouts, oracle, num_processes, name):
    folder = run_layouts(num_processes)
    parts = [torch.load(path) for path in sorted(folder.glob(f"{name}.*.pt"))]
    assert parts, "the workers stopped at this layout or before"
    expected_logits, expected_gradients = oracle(CASES[num_processes][name]["model"])

    answered = [sample_id for part in parts for sample_id in part["logits"]]
    assert sorted(answered) == sorted(expected_logits), "every sample goes through exactly one data-parallel rank"
    for part in parts:
        for sample_id, logits in part["logits"].items():
            torch.testing.assert_close(logits, expected_logits[sample_id], rtol=1e-4, atol=1e-4, msg=lambda m, i=sample_id: f"{i}: {m}")

    norm = torch.stack([gradient.norm() for gradient in expected_gradients.values()]).norm().item()
    for part in parts:
        assert part["grad_norm"] == pytest.approx(norm, rel=1e-4)
        if part["gradients"] is None:
            continue
        assert part["gradients"].keys() == expected_gradients.keys()
        for tensor, gradient in part["gradients"].items():
            error = (gradient - expected_gradients[tensor]).norm() / expected_gradients[tensor].norm().clamp(min=1e-3)
            assert error < 1e-4, f"gradient of {tensor}: relative error {error:.2e}"
