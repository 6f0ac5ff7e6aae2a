"""Stage 1: dataset -> tokenised prompts, and the order in which steps draw them.

Files or a reasoning-gym task -> list[Prompt]. Everything is read and tokenised once, at start, and identically on every rank.
Sampling parameters and the split over engines are the rollout's. Imports no torch.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from megagrpo.config.keys import did_you_mean
from megagrpo.config.paths import resolve_data_files
from megagrpo.config.schema import Config, Data
from megagrpo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_GYM = "reasoning_gym:"
# Item i of a task is drawn with seed + i: validation must start far from every training seed.
_GYM_VAL_SEED = 2**30
_MAX_LISTED_ROWS = 20


class _BadRow(ValueError):
    """Says why one row cannot be used."""


@dataclass(frozen=True, slots=True)
class _Row:
    place: str  # file:line, for messages
    columns: dict[str, Any] | _BadRow


@dataclass(frozen=True, slots=True)
class _Rendered:
    id: int
    place: str
    text: str
    columns: dict[str, Any]
    is_templated: bool  # the text holds its special tokens already


class PromptSampler:
    """Which prompts a step draws: a pure function of (seed, step), so every rank agrees and a run resumes at any step.

    One epoch after the other, each in a new order; a step may end one epoch and begin the next, or span several.
    """

    def __init__(self, prompts: list[Prompt], *, num_prompts_per_step: int, seed: int, shuffle: bool = True) -> None:
        assert prompts, "load_prompts never returns an empty list"
        self._prompts = prompts
        self._num_prompts_per_step = num_prompts_per_step
        self._seed = seed
        self._shuffle = shuffle

    def prompts_for_step(self, step: int) -> list[Prompt]:
        """The prompts of a step; steps count from 0."""
        first, size = step * self._num_prompts_per_step, len(self._prompts)
        last = first + self._num_prompts_per_step - 1
        epochs = range(first // size, last // size + 1)
        order = np.concatenate([self._epoch_order(epoch) for epoch in epochs])
        start = first - epochs[0] * size
        return [self._prompts[index] for index in order[start : start + self._num_prompts_per_step]]

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(len(self._prompts))
        # RandomState's streams are frozen (NEP 19): a run resumed under another numpy draws the same order.
        return np.random.RandomState(np.random.MT19937([self._seed, epoch])).permutation(len(self._prompts))


def load_prompts(
    files: str | list[str], config: Config, tokenizer: PreTrainedTokenizerBase, split: Literal["train", "val"]
) -> list[Prompt]:
    """The prompts of a data setting, in the dataset's order, without those dropped as too long.

    Raises ValueError, naming files and lines, for rows that cannot be used (unless data.bad_rows=skip), for overlong prompts
    (data.overlong_prompts=error), and when no prompt is left.
    """
    names = resolve_data_files(files, split=split)
    rows = [row for name in names for row in _read(name, config, split)]
    if not rows:
        raise ValueError(f"data.{split}_files: no rows in {', '.join(names) or 'an empty list of files'}")
    rendered, bad = _render_rows(rows, config.data, tokenizer)
    _report_bad_rows(bad, len(rows), config.data, split)
    prompts = _limit_lengths(rendered, _tokenise(rendered, tokenizer), config.data, tokenizer)
    if not prompts:
        raise ValueError(
            f"data.{split}_files: none of the {len(rows)} rows in {', '.join(names)} is left ({len(bad)} unusable, "
            f"{len(rendered)} longer than data.max_prompt_length={config.data.max_prompt_length})"
        )
    return prompts


def _read(name: str, config: Config, split: str) -> Iterator[_Row]:
    if name.startswith(_GYM):
        return _read_reasoning_gym(name, config, split)
    path = Path(name).expanduser()
    readers: dict[str, Callable[[Path], Iterator[_Row]]] = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise ValueError(f"data.{split}_files: {name} is neither .jsonl nor .parquet nor reasoning_gym:<task>")
    try:
        return iter(list(readers[path.suffix](path)))
    except OSError as error:
        raise ValueError(f"data.{split}_files: {name} cannot be read: {error.strerror or error}") from error


def _read_jsonl(path: Path) -> Iterator[_Row]:
    with path.open("rb") as lines:  # bytes, so that a line in another encoding is one bad row and not the end of the file
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                columns = json.loads(line)
            except ValueError as error:
                yield _Row(place, _BadRow(f"not JSON in UTF-8 ({error})"))
                continue
            yield _Row(place, columns if isinstance(columns, dict) else _BadRow("not a JSON object"))


def _read_parquet(path: Path) -> Iterator[_Row]:
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import read_table

    try:
        table = read_table(path)
    except ArrowInvalid as error:
        raise ValueError(f"{path} is no parquet file: {error}") from error
    for number, columns in enumerate(table.to_pylist(), start=1):
        yield _Row(f"{path}:{number}", columns)


def _read_reasoning_gym(name: str, config: Config, split: str) -> Iterator[_Row]:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    task, data = name.removeprefix(_GYM), config.data
    if task not in DATASETS:
        raise ValueError(f"data.{split}_files: reasoning-gym has no task {task}{did_you_mean(task, candidates=tuple(DATASETS))}")
    seed = config.trainer.seed % _GYM_VAL_SEED + (_GYM_VAL_SEED if split == "val" else 0)
    try:
        dataset = reasoning_gym.create_dataset(task, size=data.reasoning_gym_size, seed=seed, **data.reasoning_gym_config)
    except (TypeError, ValueError, AssertionError) as error:  # how its tasks refuse an unknown setting or a wrong value
        raise ValueError(f"data.reasoning_gym_config does not suit the task {task}: {error}") from error
    for index in range(data.reasoning_gym_size):
        entry = dataset[index]
        yield _Row(f"{name}:{index + 1}", {**entry, data.prompt_key: entry["question"], data.answer_key: entry["answer"]})


def _render_rows(rows: list[_Row], data: Data, tokenizer: PreTrainedTokenizerBase) -> tuple[list[_Rendered], list[str]]:
    """The usable rows as text, and what is wrong with the others."""
    has_template = tokenizer.chat_template is not None
    if data.apply_chat_template is True and not has_template:
        raise ValueError("data.apply_chat_template=true, but the tokenizer has no chat template; set it to auto or false")
    wraps_plain = has_template if data.apply_chat_template == "auto" else data.apply_chat_template
    if data.system_prompt is not None and not has_template:
        logger.warning("data.system_prompt has no effect: the tokenizer has no chat template")
    rendered, bad = [], []
    for index, row in enumerate(rows):
        try:
            if isinstance(row.columns, _BadRow):
                raise row.columns
            content = _content(row.columns, data)
            is_templated = wraps_plain or not isinstance(content, str)
            if is_templated and not has_template:
                raise _BadRow("has messages, but the tokenizer has no chat template to render them")
            text = _apply_template(content, data, tokenizer) if is_templated else content
        except _BadRow as problem:
            bad.append(f"{row.place}: {problem}")
            continue
        columns = {**row.columns, "answer": row.columns.get(data.answer_key)}
        rendered.append(_Rendered(id=index, place=row.place, text=text, columns=columns, is_templated=is_templated))
    return rendered, bad


def _content(columns: dict[str, Any], data: Data) -> str | list[dict[str, str]]:
    """A row's prompt text, suffix included, or its conversation (in `messages`, or in the prompt column)."""
    content = columns.get("messages")
    if content is None:
        content = columns.get(data.prompt_key)
    if content is None:
        raise _BadRow(f"has neither {data.prompt_key} (data.prompt_key) nor messages; its columns are {', '.join(columns) or 'none'}")
    if isinstance(content, str):
        if not content:
            raise _BadRow("has an empty prompt")
        return content + data.prompt_suffix
    if not isinstance(content, list) or not content:
        raise _BadRow("its prompt is neither text nor a list of messages")
    if not all(isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message for message in content):
        raise _BadRow("a message needs role and content")
    if content[-1]["role"] == "assistant":
        raise _BadRow("its last message is the assistant's, so nothing is left to answer")
    return content


def _apply_template(content: str | list[dict[str, str]], data: Data, tokenizer: PreTrainedTokenizerBase) -> str:
    from jinja2 import TemplateError

    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    if data.system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": data.system_prompt}, *messages]
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise _BadRow(f"the chat template refuses its messages: {error}") from error


def _report_bad_rows(bad: list[str], num_rows: int, data: Data, split: str) -> None:
    if not bad:
        return
    more = f"\n  and {len(bad) - _MAX_LISTED_ROWS} more" if len(bad) > _MAX_LISTED_ROWS else ""
    report = f"data.{split}_files: {len(bad)} of {num_rows} rows cannot be used:\n  " + "\n  ".join(bad[:_MAX_LISTED_ROWS]) + more
    if data.bad_rows == "error":
        raise ValueError(f"{report}\nCorrect them, or set data.bad_rows=skip to go on without them.")
    logger.warning(report)


def _tokenise(rendered: list[_Rendered], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of every text. A chat template has written the special tokens; plain text gets them from the tokenizer."""
    token_ids: dict[int, list[int]] = {}
    for is_templated in (True, False):
        batch = [row for row in rendered if row.is_templated == is_templated]
        if batch:  # one call: fast tokenizers work through a batch in parallel
            encoded = tokenizer([row.text for row in batch], add_special_tokens=not is_templated, return_attention_mask=False)
            token_ids |= {row.id: ids for row, ids in zip(batch, encoded["input_ids"], strict=True)}
    return [token_ids[row.id] for row in rendered]


def _limit_lengths(rendered: list[_Rendered], token_ids: list[list[int]], data: Data, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Prompts of at most data.max_prompt_length tokens; longer ones are treated as data.overlong_prompts says, and counted."""
    limit, prompts, overlong = data.max_prompt_length, [], []
    for row, ids in zip(rendered, token_ids, strict=True):
        text = row.text
        if len(ids) > limit:
            overlong.append(f"{row.place}: {len(ids)} tokens")
            if data.overlong_prompts != "truncate":
                continue
            ids = ids[-limit:]
            text = tokenizer.decode(ids)
        prompts.append(Prompt(id=row.id, text=text, token_ids=ids, columns=row.columns))
    if overlong:
        report = f"{len(overlong)} of {len(rendered)} prompts are longer than data.max_prompt_length={limit}, such as {overlong[0]}"
        if data.overlong_prompts == "error":
            raise ValueError(f"{report}; raise it, or set data.overlong_prompts to drop or truncate")
        logger.warning("%s: %s", report, {"drop": "dropped", "truncate": "cut on the left"}[data.overlong_prompts])
    return prompts
