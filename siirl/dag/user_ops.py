"""Rows of the op table that users' files hold: @declare_op above a function, read from its source. Pure."""

import ast
from dataclasses import replace
from typing import Any, get_args

from siirl.dag.ops import CUSTOM, Names, OpSpec, fixed
from siirl.errors import DagError
from siirl.spelling import suggest
from siirl.user_code.source import source_of, split_reference, top_functions

DECORATOR = "declare_op"
MODELS = ("actor", "ref", "critic", "rollout", "frozen", "frozen_score")
"""Models that users' ops can run on, without training them; the last two are of the node alone."""
OFFERED = ("engine", "scorer", "encoder", "judge")
"""SERVICES that mean something to any op."""
_NAMES = ("reads", "writes", "needs")
_KEYS = (*_NAMES, "model", "split")


def declared_op(reference: Any, who: str) -> OpSpec | None:
    """The op that "file.py:fn" or "pkg.mod:fn" declares above itself; None where it declares none.

    DagError for a declaration that is not written out, or names what there is not.
    """
    where, name = split_reference(reference, f"{who}: executable_ref")
    try:
        tree = source_of(where)
    except (ImportError, OSError, SyntaxError):
        return None  # said of the reference itself, by who checks it
    function = top_functions(tree).get(name) if tree else None
    for call in function.decorator_list if function else ():
        if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] == DECORATOR:
            return _row(call, f"{who}: executable_ref = {reference!r}: @{DECORATOR}")
    return None


def _row(call: ast.Call, who: str) -> OpSpec:
    given: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg not in _KEYS:
            raise DagError(f"{who} has no argument {keyword.arg!r}. {suggest(keyword.arg, _KEYS)}")
        try:
            given[keyword.arg] = ast.literal_eval(keyword.value)
        except ValueError as error:
            raise DagError(
                f"{who}: {keyword.arg} = {ast.unparse(keyword.value)} is not written out: a plan is made "
                'without running the file. Write texts, e.g. reads=("response_ids",).'
            ) from error
    names: dict[str, Names] = {key: _names(given.get(key, ()), f"{who}: {key}") for key in _NAMES}
    if call.args or "reads" not in given or "writes" not in given:
        raise DagError(f"{who} names no fields. Write {DECORATOR}(reads=(...), writes=(...), ...).")
    model = given.get("model")
    _check_known(model, (None, *MODELS), f"{who}: model")
    for need in names["needs"]:
        _check_known(need, OFFERED, f"{who}: needs")
    if "engine" in names["needs"] and model is None:
        raise DagError(f"{who} needs an engine, but names no model. Add model= one of {', '.join(MODELS)}.")
    split = given.get("split", "any" if model is None else "cost")
    _check_known(split, _SPLITS, f"{who}: split")
    return replace(
        CUSTOM,
        reads=fixed(*names["reads"]),
        writes=fixed(*names["writes"]),
        needs=names["needs"],
        model=model,
        split=split,
        side_effect=not names["writes"],
    )


def _names(value: Any, who: str) -> Names:
    if not isinstance(value, tuple | list) or not all(isinstance(name, str) for name in value):
        raise DagError(f'{who} = {value!r} is no list of names. Write e.g. ("score",).')
    return tuple(value)


def _check_known(value: Any, known: tuple[str | None, ...], who: str) -> None:
    if value not in known:
        raise DagError(f"{who} = {value!r} is none of {', '.join(str(name) for name in known)}. Name one.")


_SPLITS = get_args(OpSpec.__annotations__["split"])
