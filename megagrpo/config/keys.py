"""Every dotted key of the configuration, read off the schema: what exists, what it may be, what it means.

Schema -> Setting per key, and the closest keys to a misspelt one. Reads no file and checks no value.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megagrpo.config.schema import Config


@dataclass(frozen=True, slots=True)
class Setting:
    """One key that can be set.

    Example: Setting(path="optimizer.lr", default=1e-6, type_text="number > 0", meaning="Peak learning rate.", is_mapping=False)
    """

    path: str
    default: Any  # plain data: None, numbers, strings, lists, dicts
    type_text: str
    meaning: str
    is_mapping: bool  # keys of its own below it, such as reward.functions


def _child_section(field: FieldInfo) -> type[BaseModel] | None:
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _walk_sections(model: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    yield path, model
    for name, field in model.model_fields.items():
        if child := _child_section(field):
            yield from _walk_sections(child, f"{path}.{name}" if path else name)


def _type_text(schema: dict[str, Any]) -> str:
    """A JSON schema in a few words: `integer >= 1 or null`."""
    if "format" in schema:
        return schema["format"]
    if "anyOf" in schema:
        return " or ".join(_type_text(option) for option in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return " | ".join(schema.get("enum", [schema.get("const")]))
    kind = schema["type"]
    if kind == "array":
        return f"list of ({_type_text(schema['items'])})"
    if kind == "object":
        return f"mapping to ({_type_text(schema['additionalProperties'])})"
    bounds = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = [f"{sign} {schema[name]:g}" for name, sign in bounds.items() if name in schema]
    return " ".join([kind, ", ".join(limits)]).strip()


def _walk_settings() -> Iterator[Setting]:
    for section, model in SECTIONS.items():
        schemas = model.model_json_schema()["properties"]
        defaults = model().model_dump()
        for name, field in model.model_fields.items():
            if _child_section(field):
                continue
            yield Setting(
                path=f"{section}.{name}",
                default=defaults[name],
                type_text=_type_text(schemas[name]),
                meaning=" ".join((field.description or "").split()),
                is_mapping=get_origin(field.annotation) is dict,
            )


SECTIONS = MappingProxyType(dict(_walk_sections(Config, "")))  # "" is the whole configuration
SETTINGS = MappingProxyType({setting.path: setting for setting in _walk_settings()})


def locate(path: str) -> tuple[str, ...] | None:
    """Where a dotted key goes in the tree of settings, or None when there is no such key.

    Below a mapping the rest of the path is one key, dots and all: reward.functions.my.module:score.
    """
    if path in SETTINGS:
        return tuple(path.split("."))
    for parent in _prefixes(path):
        rest = path.removeprefix(f"{parent}.")
        if parent in SETTINGS and SETTINGS[parent].is_mapping:
            return *parent.split("."), rest
        if parent in SECTIONS and SECTIONS[parent].model_config["extra"] == "allow" and "." not in rest:
            return *parent.split("."), rest
    return None


def _prefixes(path: str) -> Iterator[str]:
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def did_you_mean(path: str, *, candidates: tuple[str, ...] | None = None) -> str:
    """`; did you mean a, b?` with the keys closest to a misspelt one, or nothing when none is close.

    A key also counts as close when only its last part is: `actor.lr` and `lr` find `optimizer.lr`.
    """
    keys = candidates or (tuple(SETTINGS) if "." in path else (*SECTIONS, *SETTINGS))

    def closeness(key: str) -> float:
        last_parts = (path.rpartition(".")[2], key.rpartition(".")[2])
        return max(difflib.SequenceMatcher(None, *pair).ratio() for pair in ((path, key), last_parts))

    ranked = sorted(((closeness(key), key) for key in keys), reverse=True)
    close = [key for score, key in ranked if score >= max(0.65, ranked[0][0] - 0.08)][:3]
    return f"; did you mean {', '.join(close)}?" if close else ""
