"""What the package ships to be tried: its size, its problems, its tokenizer, and how good its policy is before any GRPO."""

import json
import random
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import sentencepiece
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megagrpo.demo import DEMO_DIR, MODEL_DIR, TRAIN_FILE, VAL_FILE

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script():
    """The names of scripts/pretrain_demo.py, which is not run as a program."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / "scripts/pretrain_demo.py")))


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL_DIR, local_files_only=True)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR, local_files_only=True)


def rows_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def operands(row):
    first, second = row["prompt"].removesuffix("=").split("+")
    return int(first), int(second)


def test_the_folder_is_small():
    assert sum(path.stat().st_size for path in DEMO_DIR.rglob("*") if "__pycache__" not in path.parts) < 3e6


def test_the_model_can_be_split_by_four_either_way(model):
    config = model.config
    assert 1.0e6 <= model.num_parameters() <= 1.4e6
    assert model.dtype == torch.bfloat16
    assert config.head_dim in (32, 64)
    sizes = (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, config.intermediate_size, config.vocab_size)
    assert all(size % 4 == 0 for size in sizes)


@pytest.mark.parametrize("path", [TRAIN_FILE, VAL_FILE], ids=lambda path: path.name)
def test_answers_are_the_sums(path):
    rows = rows_of(path)
    assert all(int(row["answer"]) == sum(operands(row)) for row in rows)
    assert len({row["prompt"] for row in rows}) == len(rows)


def test_held_out_problems_occur_nowhere_else_either_way_round(script):
    held_out = {frozenset(operands(row)) for row in rows_of(VAL_FILE)}
    assert len(held_out) == 200
    _, _, pretraining = script.split_problems()
    assert held_out.isdisjoint(frozenset(operands(row)) for row in rows_of(TRAIN_FILE))
    assert held_out.isdisjoint(frozenset(problem) for problem in pretraining)


def test_the_script_makes_the_shipped_problems_and_tokenizer(script, tmp_path):
    train, val, _ = script.split_problems()
    assert script.jsonl(train) == TRAIN_FILE.read_text(encoding="utf-8")
    assert script.jsonl(val) == VAL_FILE.read_text(encoding="utf-8")
    script.write_tokenizer(tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (MODEL_DIR / path.name).read_bytes()


def test_the_pretraining_text_is_mostly_wrong(script):
    rng = random.Random(0)
    problems = rows_of(TRAIN_FILE)
    right = sum(script.mostly_wrong_answer(operands(row), rng) == sum(operands(row)) for row in problems)
    assert 0.25 < right / len(problems) < 0.4


def test_transformers_reads_the_sentencepiece_model_as_it_is(tokenizer):
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(MODEL_DIR / "tokenizer.model"))
    assert pieces.vocab_size() == len(tokenizer)
    assert tokenizer.eos_token_id == pieces.eos_id()
    for row in [*rows_of(TRAIN_FILE), *rows_of(VAL_FILE)]:
        text = row["prompt"] + row["answer"]
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text), "a token is a character, and none is added"
        assert ids == pieces.encode(text)
        assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_the_policy_answers_one_held_out_problem_in_three(model, tokenizer):
    rows = rows_of(VAL_FILE)
    prompts = tokenizer([row["prompt"] for row in rows], return_tensors="pt")
    tokens = model.generate(**prompts, max_new_tokens=16, do_sample=False)
    answers = tokenizer.batch_decode(tokens[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    accuracy = sum(answer == row["answer"] for answer, row in zip(answers, rows, strict=True)) / len(rows)
    assert 0.25 < accuracy < 0.45
