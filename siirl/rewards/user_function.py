"""The user's own reward function: found, checked without running it, and loaded. No torch."""

import ast
import difflib
import importlib
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from siirl.errors import ConfigError
from siirl.rewards.reward_registry import BATCH_ARGUMENTS, PARTS, SAMPLE_ARGUMENTS, ScoreFn
from siirl.user_code.load_object import is_there, module_of_file
from siirl.user_code.signatures import Call, Function, misfits, signature_of
from siirl.user_code.source import import_problem, may_define, module_source, parse_source, top_functions

if TYPE_CHECKING:  # a reward worker starts in half the time without it
    from siirl.config import Config

CALL = "compute_score(data_source, solution_str, ground_truth, extra_info, **reward_kwargs)"
BATCH_CALL = "compute_score(data_sources, solution_strs, ground_truths, extra_infos, **reward_kwargs)"


def check_user_function(cfg: "Config") -> None:
    """Check custom_reward_function against its source text, without running it. Called before launch.

    ConfigError if the file, module or function does not exist, or cannot be called as CALL, or as BATCH_CALL
    for reward_model.reward_manager=batch. A function that
    the source only imports or computes is checked when it is loaded.
    """
    user = cfg.custom_reward_function
    if user.path is None:
        return
    source = _source(user.path)
    if source is None:  # a module without Python source
        return
    try:
        tree = parse_source(source)
    except (SyntaxError, OSError) as error:
        raise ConfigError(
            f"custom_reward_function.path={user.path}: {import_problem(user.path, error)}"
        ) from error
    for name in user.weights or [user.name]:
        _check_function(cfg, tree, source, name)


def _check_function(cfg: "Config", tree: ast.Module, source: Path, name: str) -> None:
    user, functions = cfg.custom_reward_function, top_functions(tree)
    if name in functions:
        batch = cfg.reward_model.reward_manager == "batch"
        _check_arguments(functions[name], user.reward_kwargs, f"{name} of {source}", batch)
    elif not may_define(tree, name):
        near = difflib.get_close_matches(name, functions, n=1)
        one = f"={next(iter(functions))}" if len(functions) == 1 else ""
        key = "weights" if user.weights else "name"
        hint = f"Did you mean {near[0]!r}?" if near else f"Set custom_reward_function.{key}{one}."
        raise ConfigError(
            f"custom_reward_function.{key}={name}: {source} has no such function, it defines "
            f"{', '.join(functions) or 'no function'}. {hint}"
        )


def load_user_function(
    path: str, name: str, reward_kwargs: Mapping[str, Any], batch: bool = False
) -> ScoreFn:
    """Import the user's function. A reward worker calls it; errors of the user's module pass through.

    ConfigError if there is no such function or it cannot be called as CALL, or BATCH_CALL if batch.
    """
    call, arguments = (BATCH_CALL, BATCH_ARGUMENTS) if batch else (CALL, SAMPLE_ARGUMENTS)
    if _is_file(path):
        file = Path(path).expanduser().resolve()
        sys.path.append(str(file.parent))  # last, so that a neighbour called json.py hides no library
        module = module_of_file("custom_reward_function", file)
        assert module.__spec__ is not None and module.__spec__.loader is not None, f"{file} has no loader"
        sys.modules["custom_reward_function"] = module
        module.__spec__.loader.exec_module(module)
    else:
        module = importlib.import_module(path)
    function = getattr(module, name, None)
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise ConfigError(f"{path} has no plain function {name!r}. Define {call}.")
    try:
        signature = inspect.signature(function)
        parts = {PARTS: None} if PARTS in signature.parameters else {}
        signature.bind(**dict.fromkeys(arguments), **reward_kwargs, **parts)
    except TypeError as error:
        raise ConfigError(f"{name} of {path} cannot be called as {call}: {error}.") from error
    return function


def _is_file(path: str) -> bool:
    return path.endswith(".py") or "/" in path


def _source(path: str) -> Path | None:
    if _is_file(path):
        file = Path(path).expanduser()
        if not is_there(file):
            raise ConfigError(
                f"custom_reward_function.path={path}: there is no such file. Give a file.py, or a module "
                "pkg.mod that can be imported."
            )
        return file
    try:
        return module_source(path)
    except ModuleNotFoundError:
        raise ConfigError(
            f"custom_reward_function.path={path}: no such module can be imported. Install it, add its folder "
            "to PYTHONPATH, or give the path of a file.py."
        ) from None


def _check_arguments(function: Function, reward_kwargs: Mapping[str, Any], where: str, batch: bool) -> None:
    call, given_by_us = (BATCH_CALL, BATCH_ARGUMENTS) if batch else (CALL, SAMPLE_ARGUMENTS)
    if isinstance(function, ast.AsyncFunctionDef):
        raise ConfigError(f"{where} is a coroutine: reward functions are plain functions. Drop `async`.")
    signature = signature_of(function)
    parts = [PARTS] if PARTS in signature.parameters else []
    given = tuple(dict.fromkeys([*given_by_us, *reward_kwargs, *parts]))
    problems = misfits(signature, Call(keywords=given))
    if problems:
        raise ConfigError(
            f"{where} (line {function.lineno}) cannot be called as {call}: {'; '.join(problems)}. "
            "Change its arguments, or custom_reward_function.reward_kwargs."
        )
