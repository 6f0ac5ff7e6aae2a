"""The fields of Megatron's TransformerConfig, read from its source text: importing it would load torch.

Installed megatron-core -> names. Says nothing about their types or values.
"""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

_FILES = ("model_parallel_config.py", "transformer/transformer_config.py")
_CLASSES = ("ModelParallelConfig", "TransformerConfig")


def transformer_config_fields() -> tuple[str, ...] | None:
    """Names of all fields of TransformerConfig, inherited ones included; None where megatron-core is not installed."""
    spec = find_spec("megatron")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        core = Path(folder) / "core"
        if core.is_dir():
            return tuple(name for file in _FILES for name in _dataclass_fields(core / file))
    return None


def _dataclass_fields(file: Path) -> list[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return [
        statement.target.id
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name in _CLASSES
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    ]
