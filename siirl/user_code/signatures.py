"""Whether a function of the user's can be called as siirl calls it, by its signature alone. Pure."""

import ast
import inspect
from collections.abc import Sequence
from dataclasses import dataclass

from siirl.spelling import suggest

Function = ast.FunctionDef | ast.AsyncFunctionDef
BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class Call:
    """How siirl calls a function: these values by position, these arguments by name."""

    values: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    more: str = ""
    """Where the arguments by name come from, such as "pre_process_kwargs"."""
    awaits: bool = False
    """A coroutine will do."""

    def written(self, name: str) -> str:
        """The call in Python, as in fn(messages, episode, role=...)."""
        return f"{name}({', '.join([*self.values, *(f'{key}=...' for key in self.keywords)])})"


class _Source:
    """A default or annotation, which shows as it is written."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def signature_of(function: Function, bound: bool = False) -> inspect.Signature:
    """The signature that a definition has in its source. bound: a method, without its first argument."""
    args, kinds = function.args, inspect.Parameter
    positional = [(arg, kinds.POSITIONAL_ONLY) for arg in args.posonlyargs]
    positional += [(arg, kinds.POSITIONAL_OR_KEYWORD) for arg in args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    found = [_parameter(arg, kind, value) for (arg, kind), value in zip(positional, defaults, strict=True)]
    found = found[1:] if bound else found
    if args.vararg:
        found.append(_parameter(args.vararg, kinds.VAR_POSITIONAL, None))
    for arg, value in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        found.append(_parameter(arg, kinds.KEYWORD_ONLY, value))
    if args.kwarg:
        found.append(_parameter(args.kwarg, kinds.VAR_KEYWORD, None))
    return inspect.Signature(found)


def _parameter(arg: ast.arg, kind: inspect._ParameterKind, default: ast.expr | None) -> inspect.Parameter:
    value = inspect.Parameter.empty if default is None else _Source(ast.unparse(default))
    return inspect.Parameter(arg.arg, kind, default=value)


def needed_names(signature: inspect.Signature) -> list[str]:
    """The parameters without a default."""
    plain = (*BY_POSITION, inspect.Parameter.KEYWORD_ONLY)
    empty = inspect.Parameter.empty
    return [p.name for p in signature.parameters.values() if p.kind in plain and p.default is empty]


def misfits(signature: inspect.Signature, call: Call) -> list[str]:
    """What is wrong with such a call, one phrase each; none if it can be made."""
    parameters = list(signature.parameters.values())
    kinds = {parameter.kind for parameter in parameters}
    by_position = [p.name for p in parameters if p.kind in BY_POSITION]
    by_name = [p.name for p in parameters if p.kind in BY_NAME]
    problems = []
    if len(call.values) > len(by_position) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        problems.append(f"it takes {_values(len(by_position))}, not {len(call.values)}")
    filled = by_position[: len(call.values)]
    needed = [name for name in needed_names(signature) if name not in filled]
    problems += [f"{name} is positional-only" for name in needed if name not in by_name]
    missing = [name for name in needed if name in by_name and name not in call.keywords]
    problems += [f"it needs {name}, which is not given" for name in missing]
    for name in call.keywords:
        if name in filled and name in by_name:
            problems.append(f"{name} is given twice, by its position and by name")
        elif name not in by_name and inspect.Parameter.VAR_KEYWORD not in kinds:
            problems.append(f"it does not take {name}{_hint(name, by_name, filled)}")
    return problems


def _values(count: int) -> str:
    return f"{count or 'no'} value{'s' * (count != 1)}"


def _hint(name: str, by_name: Sequence[str], filled: Sequence[str]) -> str:
    guess = suggest(name, [known for known in by_name if known not in filled])
    return f" ({guess.rstrip('?').replace('Did you mean', 'did you mean')}?)" if guess[-1] == "?" else ""
