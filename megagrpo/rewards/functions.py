"""Stage 3: plain Python functions as reward functions: found by name, called once per response, their failures kept.

"package.module:function" or "path/file.py:function" -> a function from calls to outcomes. Weights and limits are scorer.py's.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

from megagrpo.config.keys import did_you_mean
from megagrpo.rewards.calls import Call, Outcome

RewardFunction = Callable[..., float]


def load_function(name: str) -> RewardFunction:
    """The function that `package.module:function` or `path/file.py:function` names. Raises ValueError when there is none."""
    place, _, function_name = name.rpartition(":")
    module = _load_file(name, Path(place).expanduser()) if place.endswith(".py") else _import(name, place)
    function = getattr(module, function_name, None)
    if not callable(function):
        names = tuple(key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_"))
        hint = did_you_mean(function_name, candidates=names) if names else ""
        raise ValueError(f"reward.functions: {name}: {place} has no function {function_name}{hint}")
    return function


def _load_file(name: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"reward.functions: {name}: the file {path} does not exist")
    spec = importlib.util.spec_from_file_location(f"megagrpo_user_rewards.{path.stem}", path)
    assert spec and spec.loader, f"{path} ends in .py, for which Python has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up there
    spec.loader.exec_module(module)
    return module


def _import(name: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
        raise ValueError(
            f"reward.functions: {name}: there is no module {error.name}; put its folder on PYTHONPATH, "
            "or name a file: path/file.py:function"
        ) from error


def call_each(function: RewardFunction) -> Callable[[list[Call]], list[Outcome]]:
    """A per-response reward function as one from calls to outcomes; the columns it has no parameter for are left out."""
    parameters = list(inspect.signature(function).parameters.values())
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = {p.name for p in parameters[1:] if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    response_name = parameters[0].name if parameters else None

    def arguments(call: Call) -> dict[str, Any]:
        given = {"answer": None, **call.columns, "prompt": call.prompt}
        return {key: value for key, value in given.items() if key in names or (takes_all and key != response_name)}

    def outcome(call: Call) -> Outcome:
        try:
            value = function(call.response, **arguments(call))
        # Whatever the user's code raises must not end a long run for one odd response. Nothing is hidden: the failure is
        # counted, logged with its prompt, and ends the run above reward.max_failure_fraction.
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            return Outcome(failure=f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})")
        if not isinstance(value, Real) or not math.isfinite(value):
            return Outcome(failure=f"returned {value!r}, which is no finite number")
        return Outcome(score=float(value))

    return lambda calls: [outcome(call) for call in calls]
