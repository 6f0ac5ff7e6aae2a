"""The shape of the code base: who may import what, how long a file may be, and that every file says what it is."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megagrpo"
SOURCES = [path for folder in ("megagrpo", "scripts", "tests", "tools", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
SHELL = [*sorted((ROOT / "scripts").rglob("*.sh")), ROOT / ".ci/run"]

ONLY_IN = {
    "vllm": ("rollouts.py", "weight_sync.py", "vllm_cpu.py"),
    "megatron": ("mcore/", "logprobs.py", "optimizer.py", "checkpoint.py"),
}
NOT_IN = {"torch": ("config/", "preflight/", "cli.py"), "transformers": ("config/", "preflight/", "cli.py")}
EXEMPT = ("preflight/doctor.py",)  # it looks at the device


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported_packages(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("path", [path for path in SOURCES if path.is_relative_to(PACKAGE)], ids=name_of)
def test_import_rules(path):
    place = path.relative_to(PACKAGE).as_posix()
    imported = imported_packages(path)
    for package, allowed in ONLY_IN.items():
        assert package not in imported or place.startswith(allowed), f"only {allowed} may import {package}"
    for package, forbidden in NOT_IN.items():
        assert package not in imported or place in EXEMPT or not place.startswith(forbidden), f"{place} may not import {package}"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_every_file_is_short_ascii_and_says_what_it_is(path):
    text = path.read_text(encoding="utf-8")
    assert text.isascii()
    assert len(text.splitlines()) <= 400
    assert ast.get_docstring(ast.parse(text)), "starts with a docstring"


@pytest.mark.parametrize("path", SHELL, ids=name_of)
def test_shell_scripts_stop_at_the_first_error(path):
    text = path.read_text(encoding="utf-8")
    assert text.isascii()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in text
