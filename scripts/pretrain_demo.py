"""Makes what megagrpo/demo/ ships: the problems, a SentencePiece tokenizer, and a policy that can add but mostly answers wrongly.

Nothing -> train.jsonl, val.jsonl and model/ in the output folder, in 5 minutes of one core. The policy reads right sums first, then
mostly wrong ones. Plain torch and transformers: this is no part of megagrpo. Same machine, torch and thread count: same weights.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import sentencepiece
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from megagrpo.demo import DEMO_DIR, MODEL_DIR

SEED = 20
OPERANDS = range(10, 100)
NUM_TRAIN, NUM_VAL = 2000, 200
CARRY_SHARE = 2 / 3  # of the problems need a carry: the pretrained policy gets the others right
CHARACTERS = "0123456789+-*/=()<>%^!?.,:;x "  # with <unk>, <s> and </s> a vocabulary of 32
EOS_ID = 2
PROMPT_LENGTH, ANSWER_LENGTH = len("10+10="), len("198") + 1  # tokens; the answer's with the end-of-sequence token

# How the second half of the pretraining answers. Most problems carry, so that about a third of all answers are right.
RIGHT_WITH_CARRY, FORGETS_CARRY = 0.2, 0.65  # the rest is one off, up or down
RIGHT_WITHOUT_CARRY = 0.6

Problem = tuple[int, int]
AnswerOf = Callable[[Problem, random.Random], int]
Encode = Callable[[str], list[int]]


def main() -> None:
    """Write the demo folder and say how good the policy is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=DEMO_DIR, help="folder that gets train.jsonl, val.jsonl and model/")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; the shipped weights were made with 1")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    train, val, pretraining = split_problems()
    model_dir = args.output / MODEL_DIR.relative_to(DEMO_DIR)
    model_dir.mkdir(parents=True, exist_ok=True)
    for name, problems in {"train": train, "val": val}.items():
        (args.output / f"{name}.jsonl").write_text(jsonl(problems), encoding="utf-8")
    write_tokenizer(model_dir)
    encode = sentencepiece.SentencePieceProcessor(model_file=str(model_dir / "tokenizer.model")).encode

    torch.manual_seed(SEED)
    model = new_model()
    teach(model, pretraining, right_answer, encode, num_steps=1000, peak_lr=2e-3, batch_size=256)
    print(f"held-out accuracy after right answers: {greedy_accuracy(model, val, encode):.3f}")
    teach(model, pretraining, mostly_wrong_answer, encode, num_steps=200, peak_lr=5e-4, batch_size=256)
    model.to(torch.bfloat16).save_pretrained(model_dir)
    print(f"held-out accuracy after mostly wrong answers: {greedy_accuracy(model, val, encode):.3f}")


def split_problems() -> tuple[list[Problem], list[Problem], list[Problem]]:
    """Problems for GRPO, held-out ones, and those to pretrain on (GRPO's included). a+b and b+a are never on both sides."""
    rng = random.Random(SEED)
    pairs = [(a, b) for a in OPERANDS for b in OPERANDS if a <= b]
    rng.shuffle(pairs)
    val = take(pairs, NUM_VAL)
    held_out = set(val)
    rest = [pair for pair in pairs if pair not in held_out]
    pretraining = [*rest, *((b, a) for a, b in rest if a != b)]
    rng.shuffle(pretraining)
    val = [(a, b) if rng.random() < 0.5 else (b, a) for a, b in val]
    return take(pretraining, NUM_TRAIN), val, pretraining


def take(problems: list[Problem], number: int) -> list[Problem]:
    """The first `number` of the problems that make CARRY_SHARE of them carry, in their order."""
    num_carry = round(number * CARRY_SHARE)
    carry = [problem for problem in problems if carries(problem)][:num_carry]
    plain = [problem for problem in problems if not carries(problem)][: number - num_carry]
    chosen = {*carry, *plain}
    return [problem for problem in problems if problem in chosen]


def carries(problem: Problem) -> bool:
    """Whether the units add up to ten or more."""
    a, b = problem
    return a % 10 + b % 10 >= 10


def prompt(problem: Problem) -> str:
    """The problem as the policy reads it."""
    a, b = problem
    return f"{a}+{b}="


def jsonl(problems: list[Problem]) -> str:
    """The problems as a data file with the columns prompt and answer."""
    return "".join(json.dumps({"prompt": prompt(problem), "answer": str(sum(problem))}) + "\n" for problem in problems)


def right_answer(problem: Problem, _rng: random.Random) -> int:
    """The sum."""
    return sum(problem)


def mostly_wrong_answer(problem: Problem, rng: random.Random) -> int:
    """An answer that is wrong two times in three: without the carry where there is one, or one off."""
    right, chance = sum(problem), rng.random()
    if chance < (RIGHT_WITH_CARRY if carries(problem) else RIGHT_WITHOUT_CARRY):
        return right
    if carries(problem) and chance < RIGHT_WITH_CARRY + FORGETS_CARRY:
        return right - 10
    return right + rng.choice((-1, 1))


def write_tokenizer(folder: Path) -> None:
    """Train a SentencePiece model with one piece per character, and tell transformers to read it as it is."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([CHARACTERS]),
        model_writer=model,
        model_type="bpe",
        vocab_size=3 + len(CHARACTERS),
        split_digits=True,
        byte_fallback=False,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        bos_id=1,
        eos_id=EOS_ID,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": False,
        "add_eos_token": False,
        "add_prefix_space": False,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "</s>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def new_model() -> LlamaForCausalLM:
    """A Llama of 1.1 million parameters that tensor and pipeline parallelism up to 4 divide."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=3 + len(CHARACTERS),
            hidden_size=128,
            intermediate_size=448,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=32,
            max_position_embeddings=128,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=EOS_ID,
            pad_token_id=EOS_ID,
        )
    )


def teach(
    model: LlamaForCausalLM, problems: list[Problem], answer: AnswerOf, encode: Encode, *, num_steps: int, peak_lr: float, batch_size: int
) -> None:
    """Supervised steps on answered problems, the loss on the answers alone. The learning rate rises, stays, and falls to zero."""
    rng = random.Random(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.98), weight_decay=0.05)
    warmup, decay = num_steps // 10, num_steps // 2
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / warmup, (num_steps - step) / decay))
    batches, start = answered_problems(problems, answer, encode, rng, batch_size=batch_size), time.monotonic()
    for step in range(1, num_steps + 1):
        tokens = next(batches)
        logits = model(tokens[:, :-1]).logits[:, PROMPT_LENGTH - 1 :]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, PROMPT_LENGTH:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step:5}  loss {loss:.4f}  {time.monotonic() - start:5.0f} s", flush=True)


def answered_problems(
    problems: list[Problem], answer: AnswerOf, encode: Encode, rng: random.Random, *, batch_size: int
) -> Iterator[Tensor]:
    """Endless batches [batch_size, PROMPT_LENGTH + ANSWER_LENGTH] of token ids, short answers filled up with EOS."""
    kinds = [[problem for problem in problems if carries(problem) == kind] for kind in (False, True)]
    while True:
        chosen = [rng.choice(kinds[rng.random() < CARRY_SHARE]) for _ in range(batch_size)]
        rows = [encode(prompt(problem) + str(answer(problem, rng))) for problem in chosen]
        yield torch.tensor([ids + [EOS_ID] * (PROMPT_LENGTH + ANSWER_LENGTH - len(ids)) for ids in rows])


@torch.no_grad()
def greedy_accuracy(model: LlamaForCausalLM, problems: list[Problem], encode: Encode) -> float:
    """Share of the problems that the likeliest tokens, taken one after the other, answer rightly."""
    tokens = torch.tensor([encode(prompt(problem)) for problem in problems])
    for _ in range(ANSWER_LENGTH):
        tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
    right = 0
    for problem, ids in zip(problems, tokens[:, PROMPT_LENGTH:].tolist(), strict=True):
        answer = encode(str(sum(problem)))
        right += ids[: len(answer) + 1] == [*answer, EOS_ID]
    return right / len(problems)


if __name__ == "__main__":
    main()
