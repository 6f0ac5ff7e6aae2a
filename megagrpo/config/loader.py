"""Reads the configuration: schema defaults < --config files in order < dotted overrides on the command line.

Arguments -> Config, or one ConfigError that lists every problem with where it was given. Opens no model and no dataset.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from megagrpo.config.keys import SECTIONS, SETTINGS, did_you_mean, locate
from megagrpo.config.paths import DEMO_RECIPE
from megagrpo.config.schema import Config

_COMMAND_LINE = "command line"
_LAYOUT_KEYS = tuple(f"actor.{kind}_model_parallel_size" for kind in ("tensor", "pipeline", "virtual_pipeline", "expert")) + (
    "actor.context_parallel_size",
)


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, as one readable message."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n\n".join([f"The configuration has {count}:", *(f"  {problem}" for problem in problems)]))


@dataclass(frozen=True, slots=True)
class _Entry:
    """One value as it was given."""

    path: str  # dotted
    value: Any
    origin: str  # file and line, or the command line

    def problem(self, message: str) -> str:
        value = yaml.safe_dump(self.value, default_flow_style=True, width=10**6).removesuffix("\n").removesuffix("\n...")
        return f"{self.path} = {value}    ({self.origin})\n      {message}"


def load_config(argv: list[str], *, world_size: int = 1) -> Config:
    """The configuration that command-line arguments ask for.

    argv: `--config FILE` (repeatable) and `section.key=value` in any order; values are YAML, `key=` is null. Without a file the
    demo recipe is used, in a layout that fits `world_size` processes unless the layout is given. Mappings of sections are merged
    key by key; lists and mapping-valued settings (reward.functions) are replaced. Raises ConfigError with all problems at once.
    """
    problems: list[str] = []
    files, overrides = _split_arguments(argv, problems)
    override_entries = [entry for text in overrides for entry in _override_entries(text, problems)]
    entries = [entry for file in files or [DEMO_RECIPE] for entry in _file_entries(Path(file), problems)]
    if not files and not any(entry.path in _LAYOUT_KEYS for entry in override_entries):
        entries += _demo_layout(world_size)
    tree, given = _merge(entries + override_entries, problems)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(problems + _explain(error, given)) from None
    if problems:
        raise ConfigError(problems)
    return config


def dump_config(config: Config) -> str:
    """The configuration as YAML with every key: `--config` reads it back to an equal one."""
    return yaml.safe_dump(config.model_dump(), sort_keys=False, allow_unicode=False, width=120)


def _split_arguments(argv: list[str], problems: list[str]) -> tuple[list[str], list[str]]:
    files, overrides = [], []
    arguments = iter(argv)
    for argument in arguments:
        if argument == "--config":
            file = next(arguments, None)
            if file is None:
                problems.append(f"--config    ({_COMMAND_LINE})\n      names no file; write --config FILE")
            else:
                files.append(file)
        elif argument.startswith("--config="):
            files.append(argument.removeprefix("--config="))
        else:
            overrides.append(argument)
    return files, overrides


class _YamlLoader(yaml.SafeLoader):
    """YAML 1.1 as PyYAML reads it, but 1e-6 is a number and a key given twice is an error."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(problem=f"{key.value} is given twice", problem_mark=key.start_mark)
            seen.add(key.value)
        super().flatten_mapping(node)


_YamlLoader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789"))


def _file_entries(file: Path, problems: list[str]) -> list[_Entry]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        problems.append(f"--config {file}    ({_COMMAND_LINE})\n      cannot be read: {reason}")
        return []
    try:
        return list(_yaml_entries(text, "", lambda line: f"{file}:{line}"))
    except yaml.YAMLError as error:
        problems.append(f"{file}\n      is not valid YAML: {_yaml_problem(error)}")
        return []


def _override_entries(text: str, problems: list[str]) -> list[_Entry]:
    path, equals, value = text.removeprefix("--").partition("=")
    if path.startswith(("+", "~")):
        hint = f"no + or ~ here; write {path.lstrip('+~')}=value (key= sets null)"
    elif not equals or not path:
        hint = f"an override has the form section.key=value{did_you_mean(path) if path else ''}"
    else:
        try:
            return list(_yaml_entries(value, path, lambda _: _COMMAND_LINE))
        except yaml.YAMLError as error:
            hint = f"the value is not valid YAML ({_yaml_problem(error)}); put it in quotes"
    problems.append(f"{text}    ({_COMMAND_LINE})\n      {hint}")
    return []


def _yaml_problem(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return str(error).splitlines()[0]


def _yaml_entries(text: str, path: str, origin_of_line: Callable[[int], str]) -> Iterator[_Entry]:
    """One entry per setting of a YAML text that is the value of `path`: mappings of sections are descended, the rest are values."""
    loader = _YamlLoader(text)
    try:
        root = loader.get_single_node()
        if root is None and path not in SECTIONS:
            yield _Entry(path, None, origin_of_line(1))
        elif root is not None:
            yield from _node_entries(loader, root, path, origin_of_line)
    finally:
        loader.dispose()


def _node_entries(loader: _YamlLoader, node: yaml.Node, path: str, origin_of_line: Callable[[int], str]) -> Iterator[_Entry]:
    if path in SECTIONS and isinstance(node, yaml.MappingNode):
        loader.flatten_mapping(node)
        for key, value in node.value:
            name = str(loader.construct_object(key, deep=True))
            yield from _node_entries(loader, value, f"{path}.{name}" if path else name, origin_of_line)
        return
    value = loader.construct_object(node, deep=True)
    if path not in SECTIONS or value is not None:  # a section with every key commented out is null: nothing is set
        yield _Entry(path, value, origin_of_line(node.start_mark.line + 1))


def _demo_layout(world_size: int) -> list[_Entry]:
    """Tensor parallel 2, then pipeline parallel 2, where the number of processes allows; data parallel takes the rest."""
    origin = f"the demo's layout for {world_size} processes"
    sizes = {"tensor": 2 if world_size % 2 == 0 else 1, "pipeline": 2 if world_size % 4 == 0 else 1}
    return [_Entry(f"actor.{kind}_model_parallel_size", size, origin) for kind, size in sizes.items()]


def _merge(entries: Iterable[_Entry], problems: list[str]) -> tuple[dict[str, Any], dict[str, _Entry]]:
    """Later entries win. Returns the tree of values for pydantic, and who gave each dotted key."""
    tree: dict[str, Any] = {}
    given: dict[str, _Entry] = {}
    for entry in entries:
        place = locate(entry.path)
        if place is None:
            problems.append(_misplaced(entry))
            continue
        node = tree
        for depth, name in enumerate(place[:-1], start=1):
            parent = SETTINGS.get(".".join(place[:depth]))
            # One entry of a mapping-valued setting changes what the mapping is so far, which may be its default.
            start = dict(parent.default) if parent else {}
            node = node.setdefault(name, start)
        node[place[-1]] = entry.value
        given[entry.path] = entry
    return tree, given


def _misplaced(entry: _Entry) -> str:
    if not entry.path:
        return f"{entry.origin}\n      a configuration file is a mapping of sections, such as `optimizer:` with `lr: 1e-6` below it"
    if entry.path in SECTIONS:
        first_key = next(iter(SECTIONS[entry.path].model_fields))
        return entry.problem(f"is a section; set one of its keys, such as {entry.path}.{first_key}")
    return entry.problem(f"unknown key{did_you_mean(entry.path)}")


def _explain(error: ValidationError, given: dict[str, _Entry]) -> list[str]:
    """One problem per setting, where pydantic reports one error per branch of a union."""
    reasons: dict[str, list[str]] = {}
    for details in error.errors(include_url=False):
        reason = details["msg"].removeprefix("Value error, ").replace("Input should be ", "must be ")
        if details["type"] == "string_type":
            reason += " (in quotes, if this is a text)"
        reasons.setdefault(_path_of(details["loc"]), []).append(reason)
    problems = []
    for path, texts in reasons.items():
        # What is wrong in a mapping was given with its own key or with the whole mapping.
        entry = given.get(path) or given.get(path.rpartition(".")[0]) or _Entry(path, SETTINGS[path].default, "default")
        problems.append(entry.problem(" or ".join(dict.fromkeys(texts)).replace(" or must be ", " or ")))
    return problems


def _path_of(location: tuple[int | str, ...]) -> str:
    """The dotted key of a pydantic error location, whose tail may name union branches and list positions."""
    path = ""
    for part in location:
        longer = f"{path}.{part}" if path else str(part)
        if longer not in SECTIONS and locate(longer) is None:
            break
        path = longer
        if path not in SECTIONS and path not in SETTINGS:
            break  # a key of a mapping: what follows is not a key
    return path
