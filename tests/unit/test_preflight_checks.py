"""The preflight checks: what fits passes, and every inconsistency is named with its fix, all at once."""

import json
import re
from pathlib import Path

import pytest

from megagrpo.config.loader import load_config
from megagrpo.config.paths import DEMO
from megagrpo.config.schema import Config
from megagrpo.preflight.checks import check_config, check_run, read_model_config
from megagrpo.preflight.layout import Layout
from megagrpo.preflight.megatron_fields import transformer_config_fields

ROOT = Path(__file__).resolve().parents[2]

DENSE = {
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 1024,
}
MOE = DENSE | {"num_local_experts": 4, "moe_intermediate_size": 32}


@pytest.fixture
def problems_of(tmp_path):
    """Problems of overrides on top of the defaults, with real data files."""
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    base = tmp_path / "base.yaml"
    base.write_text(f"data: {{train_files: {data}}}\n")

    def check(*overrides: str, world_size: int = 8, local_world_size: int | None = None, model: dict | None = None) -> list[str]:
        config = load_config(["--config", str(base), *overrides])
        model_config = DENSE if model is None else model
        return check_config(config, world_size=world_size, local_world_size=local_world_size or world_size, model_config=model_config)

    return check


def actor(**sizes: object) -> list[str]:
    names = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "vpp": "virtual_pipeline_model_parallel_size"}
    names |= {"ep": "expert_model_parallel_size", "etp": "expert_tensor_parallel_size", "sp": "sequence_parallel"}
    names |= {"first": "num_layers_in_first_pipeline_stage", "last": "num_layers_in_last_pipeline_stage"}
    return [f"actor.{names[name]}={str(size).lower()}" for name, size in sizes.items()]


@pytest.mark.parametrize(
    ("overrides", "world_size", "model"),
    [
        ([], 1, DENSE),
        (actor(tp=2, pp=2), 8, DENSE),
        (["rollout.tensor_parallel_size=8"], 8, DENSE),  # more ranks than key-value heads: vLLM replicates them
        (actor(pp=4, vpp=2), 4, DENSE),
        (actor(pp=4, first=1, last=1), 4, DENSE),
        (actor(pp=2, first=3, last=5), 2, DENSE),
        (actor(pp=4, vpp=2, first=2), 4, DENSE),
        ([*actor(tp=2), "rollout.tensor_parallel_size=4"], 8, DENSE),
        (actor(ep=4), 8, MOE),
        ([*actor(tp=2, ep=2, etp=2, sp=True), "rollout.enable_expert_parallel=true"], 8, MOE),
        ([*actor(pp=3), "rollout.tensor_parallel_size=3"], 6, {}),  # unknown shapes are not judged
    ],
)
def test_what_fits_passes(problems_of, overrides, world_size, model):
    assert problems_of(*overrides, world_size=world_size, model=model) == []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (actor(tp=4, pp=4), "8 processes are not a multiple of actor tensor x pipeline x context parallel size = 16; start"),
        (actor(sp=True), "actor.sequence_parallel=true needs actor.tensor_model_parallel_size > 1"),
        (actor(vpp=2), "actor.virtual_pipeline_model_parallel_size needs actor.pipeline_model_parallel_size > 1"),
        (actor(first=2), "actor.num_layers_in_first_pipeline_stage needs actor.pipeline_model_parallel_size > 1"),
        (actor(pp=4, vpp=4), "8 layers cannot be shared out evenly over 4 stages x 4 chunks"),
        (actor(pp=2, first=3, last=4), "1 layers (8 without the first and last stage's 7) cannot be shared out evenly over 0 stages"),
        (actor(pp=2, vpp=3, first=2), "actor.num_layers_in_first_pipeline_stage=2 is not a multiple of"),
        (actor(ep=2), "actor.expert_model_parallel_size=2 needs a mixture-of-experts model"),
        (["rollout.enable_expert_parallel=true"], "rollout.enable_expert_parallel=true needs a mixture-of-experts model"),
        (["data.max_prompt_length=900"], "data.max_prompt_length + rollout.max_response_length = 1156 exceeds the model's 1024 positions"),
        (["rollout.num_samples_per_prompt=1"], "makes every advantage zero"),
        (["algorithm.num_mini_batches=5"], "algorithm.num_mini_batches=5 does not divide rollout.num_prompts_per_step=32"),
        (["rollout.num_prompts_per_step=2", "rollout.num_samples_per_prompt=2"], "a mini-batch has 4 samples for 8 data-parallel ranks"),
        (["optimizer.min_lr=1.0"], "optimizer.min_lr=1.0 is above optimizer.lr=1e-06"),
        (["optimizer.optimizer=sgd"], "set actor.use_distributed_optimizer=false"),
        (["actor.context_parallel_size=2", "trainer.device=cpu"], "actor.context_parallel_size=2 is not supported yet"),
        (["actor.transformer_impl=transformer_engine", "trainer.device=cpu"], "needs a GPU and TransformerEngine"),
        (["data.train_files=[]"], "data.train_files names no file"),
        (["data.val_files=no/such.jsonl"], "data.val_files: no/such.jsonl does not exist"),
        (["data.val_files=problems.csv"], "problems.csv is neither .jsonl nor .parquet nor reasoning_gym:<task>"),
        (["model.tokenizer_path=no/such"], "model.tokenizer_path=no/such is not a folder"),
        (["reward.functions={}"], "reward.functions is empty"),
        (["reward.functions={math_answr: 1}"], "math_answr is neither one of"),
        (["reward.functions={no/such.py:score: 1}"], "the file no/such.py does not exist"),
        (["reward.functions={reasoning_gym: 1}"], "scores the answers of data.train_files=reasoning_gym:<task> only"),
    ],
)
def test_each_inconsistency_is_named_with_its_fix(problems_of, overrides, expected):
    (problem,) = problems_of(*overrides)
    assert expected in problem


@pytest.mark.parametrize("key", ["actor.tensor_model_parallel_size", "rollout.tensor_parallel_size"])
def test_tensor_parallel_must_divide_the_model(problems_of, key):
    shape = {"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 96}
    heads, kv_heads = problems_of(f"{key}=2", model=shape)
    assert f"{key}=2 does not divide the model's num_attention_heads=9; set {key} to a divisor of 9" in heads
    assert f"{key}=2 does not divide the model's num_key_value_heads=3; set {key} to a divisor of 3" in kv_heads
    (width,) = problems_of(f"{key}=4", model={"num_attention_heads": 8, "intermediate_size": 90})
    assert "intermediate_size=90" in width


def test_experts_are_laid_out_beside_the_dense_layers(problems_of):
    (experts,) = problems_of(*actor(ep=8), model=MOE)
    assert "does not divide the model's 4 experts" in experts
    (processes,) = problems_of(*actor(ep=4), world_size=2, model=MOE)
    assert "actor expert tensor x expert x pipeline parallel size = 4" in processes
    (sequence,) = problems_of(*actor(tp=2), model=MOE)
    assert "needs actor.sequence_parallel=true" in sequence
    (width,) = problems_of(*actor(etp=2), model=MOE | {"moe_intermediate_size": 33})
    assert "does not divide the width 33 of an expert" in width


def test_rollout_tensor_parallel_must_stay_within_a_node(problems_of):
    (problem,) = problems_of("rollout.tensor_parallel_size=8", world_size=16, local_world_size=4)
    assert "does not divide the 4 processes of a node; set it to a divisor of 4" in problem


def test_all_inconsistencies_are_reported_at_once(problems_of):
    overrides = [*actor(pp=5), "rollout.tensor_parallel_size=4", "optimizer.min_lr=1.0", "data.val_files=x.jsonl"]
    found = problems_of(*overrides, local_world_size=2)
    causes = ("8 processes", "rollout.tensor_parallel_size=4", "8 layers", "optimizer.min_lr=1.0", "data.val_files")
    assert [any(cause in problem for problem in found) for cause in causes] == [True] * len(causes)


def test_fields_read_from_megatrons_source_are_those_of_the_class():
    from dataclasses import fields

    from megatron.core.transformer.transformer_config import TransformerConfig

    assert set(transformer_config_fields()) == {field.name for field in fields(TransformerConfig)}


def test_overridden_megatron_fields_are_checked(problems_of):
    prefix = "actor.override_transformer_config"
    assert problems_of(f"{prefix}.moe_aux_loss_coeff=1e-3", f"{prefix}.masked_softmax_fusion=false") == []
    (unknown,) = problems_of(f"{prefix}.attention_softmax_in_fp=true")
    assert "is no field of Megatron's TransformerConfig; did you mean attention_softmax_in_fp32?" in unknown
    (owned,) = problems_of(f"{prefix}.tensor_model_parallel_size=2")
    assert "has a setting of its own; set actor.tensor_model_parallel_size" in owned


def test_model_config_is_read_or_refused_with_the_reason(tmp_path):
    with pytest.raises(ValueError, match="is not a folder; set it to a Hugging Face model folder"):
        read_model_config(str(tmp_path / "missing"))
    with pytest.raises(ValueError, match="has no config.json"):
        read_model_config(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        read_model_config(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    assert read_model_config(str(tmp_path)) == DENSE


def test_a_missing_model_does_not_hide_other_problems(tmp_path):
    config = load_config([f"model.path={tmp_path / 'missing'}", "optimizer.min_lr=1"])
    missing, *others = check_run(config, world_size=1, local_world_size=1)
    assert "is not a folder" in missing
    assert any("optimizer.min_lr" in problem for problem in others)


def test_layout_in_numbers_and_words():
    config = load_config(["rollout.tensor_parallel_size=4", "rollout.num_prompts_per_step=6"], world_size=8)
    layout = Layout(config, 8)
    assert (layout.data_parallel_size, layout.num_engines) == (2, 2)
    assert "actor      TP2 PP2 DP2" in layout.table()
    assert "rollout    2 engines of TP4" in layout.table()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 8])
def test_the_demo_fits_every_process_count(world_size):
    assert check_run(load_config([], world_size=world_size), world_size=world_size, local_world_size=world_size) == []


NAMED_RECIPES = sorted((ROOT / "configs").glob("grpo-*.yaml"))


@pytest.mark.parametrize("recipe", NAMED_RECIPES, ids=lambda path: path.name)
def test_recipes_fit_the_layout_in_their_name(recipe):
    name = re.fullmatch(r"grpo-.+-(?P<n>\d+)n(?P<g>\d+)g-tp(?P<tp>\d+)pp(?P<pp>\d+)(ep(?P<ep>\d+))?\.yaml", recipe.name)
    assert name, "recipes are named grpo-<model>-<data>-<nodes>n<gpus>g-tp<X>pp<Y>[ep<Z>].yaml"
    config = load_config(["--config", str(recipe)])
    sizes = (config.actor.tensor_model_parallel_size, config.actor.pipeline_model_parallel_size, config.actor.expert_model_parallel_size)
    assert sizes == (int(name["tp"]), int(name["pp"]), int(name["ep"] or 1))
    gpus = int(name["g"])
    found = check_config(config, world_size=int(name["n"]) * gpus, local_world_size=gpus, model_config={})
    assert [problem for problem in found if "does not exist" not in problem and "is not a folder" not in problem] == []


def test_the_defaults_name_no_file_outside_the_package():
    assert Config().model.path == Config().data.train_files == "demo"
    assert (DEMO / "recipe.yaml").is_file()


def test_model_types_are_those_of_the_mapping():
    from megagrpo.hf_mapping.families import FAMILIES
    from megagrpo.preflight.checks import MODEL_TYPES

    assert tuple(FAMILIES) == MODEL_TYPES


@pytest.mark.parametrize("field", ["calculate_per_token_loss", "hidden_dropout", "num_layers"])
def test_fields_the_run_relies_on_cannot_be_overridden(field):
    problems = check_config(
        load_config([f"actor.override_transformer_config.{field}=1"]), world_size=1, local_world_size=1, model_config={}
    )
    assert any(f"override_transformer_config.{field} follows from the model" in problem for problem in problems)
