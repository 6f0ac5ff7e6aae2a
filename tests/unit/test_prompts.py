"""Datasets become prompts: every format, chat templates, bad and overlong rows, and an order that depends on seed and step alone."""

import json
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megagrpo.config.schema import Config, Data, Trainer
from megagrpo.prompts import PromptSampler, load_prompts
from megagrpo.types import Prompt

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role not in ('system', 'user', 'assistant') %}{{ raise_exception('unknown role ' + message.role) }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer(chat_template=None):
    """One token per byte; the tokenizer itself puts <s> before plain text."""
    vocab = {token: index for index, token in enumerate(["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = Tokenizer(models.BPE(vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = chat_template
    return tokenizer


@pytest.fixture(scope="module")
def plain():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def chat():
    return byte_tokenizer(CHAT_TEMPLATE)


def load(files, tokenizer, *, split="train", seed=0, **data):
    return load_prompts(files, Config(data=Data(**data), trainer=Trainer(seed=seed)), tokenizer, split)


@pytest.fixture
def jsonl(tmp_path):
    def write(*rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
        return str(path)

    return write


def test_plain_prompts_keep_their_columns(jsonl, plain):
    file = jsonl({"prompt": "2+3=", "answer": "5", "level": 1}, "", {"prompt": "4+4=", "answer": "8", "level": 2})
    first, second = load(file, plain, prompt_suffix=" ")
    assert (first.id, first.text, first.columns) == (0, "2+3= ", {"prompt": "2+3=", "answer": "5", "level": 1})
    assert (second.id, second.text) == (1, "4+4= ")
    assert plain.decode(first.token_ids) == "<s>2+3= "


def test_other_column_names(jsonl, plain):
    file = jsonl({"question": "How many?", "solution": "#### 42"})
    (prompt,) = load(file, plain, prompt_key="question", answer_key="solution")
    assert prompt.text == "How many?"
    assert prompt.columns["answer"] == prompt.columns["solution"] == "#### 42"


def test_chat_template_wraps_once_and_leaves_the_special_tokens_to_the_template(jsonl, chat):
    conversation = [{"role": "system", "content": "Own."}, {"role": "user", "content": "Hi"}]
    file = jsonl({"prompt": "2+3="}, {"messages": conversation}, {"prompt": conversation[1:]})
    texts = ["<s><system>Be brief.\n<user>2+3=!\n<assistant>", "<s><system>Own.\n<user>Hi\n<assistant>"]
    texts.append("<s><system>Be brief.\n<user>Hi\n<assistant>")
    prompts = load(file, chat, system_prompt="Be brief.", prompt_suffix="!")
    assert [prompt.text for prompt in prompts] == texts
    assert [chat.decode(prompt.token_ids) for prompt in prompts] == texts, "exactly one <s>"


def test_chat_template_can_be_refused_and_demanded(jsonl, plain, chat):
    file = jsonl({"prompt": "2+3="})
    (prompt,) = load(file, chat, apply_chat_template=False)
    assert chat.decode(prompt.token_ids) == "<s>2+3="
    with pytest.raises(ValueError, match="apply_chat_template=true, but the tokenizer has no chat template"):
        load(file, plain, apply_chat_template=True)
    with pytest.raises(ValueError, match=r"rows.jsonl:1: has messages, but the tokenizer has no chat template"):
        load(jsonl({"messages": [{"role": "user", "content": "Hi"}]}), plain)


BAD_ROWS = {
    '{"prompt": "2+': "not JSON",
    "[1, 2]": "not a JSON object",
    '{"text": "2+3="}': r"neither prompt \(data.prompt_key\) nor messages; its columns are text",
    '{"prompt": ""}': "empty prompt",
    '{"prompt": 5}': "neither text nor a list",
    '{"messages": []}': "neither text nor a list",
    '{"messages": [{"role": "user"}]}': "needs role and content",
    '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}': "last message is the assistant's",
    '{"messages": [{"role": "robot", "content": "Hi"}]}': "chat template refuses its messages: unknown role robot",
}


@pytest.mark.parametrize(("line", "reason"), BAD_ROWS.items())
def test_a_bad_row_is_named(jsonl, chat, caplog, line, reason):
    file = jsonl({"prompt": "1+1="}, line, {"prompt": "2+2="})
    with pytest.raises(ValueError, match=rf"1 of 3 rows cannot be used:\n  .*rows.jsonl:2: .*{reason}"):
        load(file, chat)
    prompts = load(file, chat, bad_rows="skip")
    assert [prompt.id for prompt in prompts] == [0, 2], "an id is a position in the file, whatever is skipped"
    assert "rows.jsonl:2" in caplog.text


def test_a_line_in_another_encoding_is_one_bad_row(tmp_path, plain):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xe9"}\n{"prompt": "b"}\n')
    assert [prompt.text for prompt in load(str(path), plain, bad_rows="skip")] == ["a", "b"]


def test_many_bad_rows_are_summed_up(jsonl, plain):
    with pytest.raises(ValueError, match="25 of 25 rows cannot be used") as error:
        load(jsonl(*["{"] * 25), plain)
    assert "rows.jsonl:20:" in str(error.value) and "rows.jsonl:21:" not in str(error.value)
    assert "and 5 more" in str(error.value)


def test_overlong_prompts(jsonl, plain, caplog):
    file = jsonl({"prompt": "12345678"}, {"prompt": "123"})
    (kept,) = load(file, plain, max_prompt_length=4)
    assert (kept.id, kept.text) == (1, "123")
    assert "1 of 2 prompts are longer than data.max_prompt_length=4" in caplog.text and "rows.jsonl:1: 9 tokens" in caplog.text
    cut, _ = load(file, plain, max_prompt_length=4, overlong_prompts="truncate")
    assert (cut.text, len(cut.token_ids)) == ("5678", 4)
    with pytest.raises(ValueError, match="rows.jsonl:1: 9 tokens; raise it"):
        load(file, plain, max_prompt_length=4, overlong_prompts="error")
    with pytest.raises(ValueError, match="none of the 2 rows in .*rows.jsonl is left"):
        load(file, plain, max_prompt_length=2)


def test_nothing_to_read(tmp_path, jsonl, plain):
    with pytest.raises(ValueError, match="no rows in .*rows.jsonl"):
        load(jsonl(), plain)
    with pytest.raises(ValueError, match=r"absent.jsonl cannot be read: No such file"):
        load(str(tmp_path / "absent.jsonl"), plain)
    with pytest.raises(ValueError, match="rows.csv is neither .jsonl nor .parquet"):
        load(jsonl(name="rows.csv"), plain)
    with pytest.raises(ValueError, match="rows.parquet is no parquet file"):
        load(jsonl({"prompt": "a"}, name="rows.parquet"), plain)


def test_parquet_and_several_files(tmp_path, jsonl, chat):
    table = pyarrow.Table.from_pylist([{"messages": [{"role": "user", "content": "Hi"}], "answer": 3}, {"messages": None, "answer": 4}])
    path = str(tmp_path / "rows.parquet")
    pyarrow.parquet.write_table(table, path)
    prompts = load([jsonl({"prompt": "2+3="}), path], chat, bad_rows="skip")
    assert [(prompt.id, prompt.columns["answer"]) for prompt in prompts] == [(0, None), (1, 3)]
    assert prompts[1].text == "<s><user>Hi\n<assistant>"
    with pytest.raises(ValueError, match="rows.parquet:2: has neither prompt"):
        load(path, chat)


def test_reasoning_gym_task(plain):
    settings = {"reasoning_gym_size": 50, "reasoning_gym_config": {"min_terms": 3, "max_terms": 3, "min_digits": 4}}
    train = load("reasoning_gym:chain_sum", plain, **settings)
    held_out = load("reasoning_gym:chain_sum", plain, split="val", **settings)
    assert len(train) == len(held_out) == 50
    assert train == load("reasoning_gym:chain_sum", plain, **settings)
    assert not {prompt.text for prompt in train} & {prompt.text for prompt in held_out}
    expression = train[0].columns["metadata"]["expression"]
    assert expression in train[0].text and eval(expression) == int(train[0].columns["answer"])


def test_reasoning_gym_mistakes(plain):
    with pytest.raises(ValueError, match="no task chain_sums; did you mean chain_sum"):
        load("reasoning_gym:chain_sums", plain)
    for settings in ({"no_such": 1}, {"min_terms": 5, "max_terms": 2}):
        with pytest.raises(ValueError, match="data.reasoning_gym_config does not suit the task chain_sum"):
            load("reasoning_gym:chain_sum", plain, reasoning_gym_config=settings)


def sampler(num_prompts, per_step, **settings):
    prompts = [Prompt(id=index, text=str(index), token_ids=[index], columns={}) for index in range(num_prompts)]
    return PromptSampler(prompts, num_prompts_per_step=per_step, **{"seed": 7, **settings})


def ids(prompts):
    return [prompt.id for prompt in prompts]


@given(num_prompts=st.integers(1, 40), per_step=st.integers(1, 50), seed=st.integers(0, 2**64))
def test_every_epoch_draws_every_prompt_once(num_prompts, per_step, seed):
    num_steps = -(-3 * num_prompts // per_step)
    drawn = [id for step in range(num_steps) for id in ids(sampler(num_prompts, per_step, seed=seed).prompts_for_step(step))]
    for first in range(0, len(drawn) - num_prompts + 1, num_prompts):
        assert sorted(drawn[first : first + num_prompts]) == list(range(num_prompts))


def test_a_step_does_not_depend_on_the_steps_before():
    resumed, whole = sampler(10, 4), sampler(10, 4)
    history = [ids(whole.prompts_for_step(step)) for step in range(12)]
    assert ids(resumed.prompts_for_step(11)) == history[11]


def test_order_depends_on_epoch_and_seed():
    first, second = (ids(sampler(50, 50).prompts_for_step(step)) for step in (0, 1))
    assert first != second
    assert first != ids(sampler(50, 50, seed=8).prompts_for_step(0))
    assert ids(sampler(5, 3, shuffle=False).prompts_for_step(1)) == [3, 4, 0]


def test_order_is_the_same_on_every_machine():
    """Written down once: a run that is resumed elsewhere must draw what it would have drawn here."""
    assert ids(sampler(8, 8).prompts_for_step(0)) == [7, 4, 6, 1, 5, 0, 2, 3]


def test_imports_no_torch():
    subprocess.run([sys.executable, "-c", "import megagrpo.prompts, sys; assert 'torch' not in sys.modules"], check=True)
