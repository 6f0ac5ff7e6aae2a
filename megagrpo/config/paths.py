"""Where things named in a configuration lie on disk: the word `demo` stands for what the package ships.

Setting -> path. Only the word is resolved here: whether the file exists is for preflight/checks.py to say.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

DEMO = Path(__file__).resolve().parent.parent / "demo"
DEMO_RECIPE = DEMO / "recipe.yaml"


def resolve_model_path(path: str) -> Path:
    """Folder of a model (or tokenizer): `demo` is the shipped one, anything else is taken as written."""
    return DEMO / "model" if path == "demo" else Path(path).expanduser()


def resolve_data_files(files: str | list[str] | None, *, split: Literal["train", "val"]) -> list[str]:
    """The files (or `reasoning_gym:<task>` names) of a data setting; null is no file, `demo` the shipped file of the split."""
    names = [] if files is None else [files] if isinstance(files, str) else files
    return [str(DEMO / f"{split}.jsonl") if name == "demo" else name for name in names]
