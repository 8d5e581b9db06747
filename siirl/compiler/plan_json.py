"""Dataclasses of plain data to JSON text and back, guided by their type hints. Rank tuples become "0-3,8"."""

import dataclasses
import functools
import json
import types
import typing
from typing import Any, TypeVar

from siirl.parallel.placement import format_ranks, parse_ranks
from siirl.types import FieldKey

T = TypeVar("T")

_OLDER = {"decodes_on": "runs_in_background"}
"""Names of fields in the plans of older runs -> today's."""
_OLDER_OPS = {"partial_rollout": "rollout", "partial_interaction": "interaction"}
"""Names of ops in those -> today's."""


def encode(value: Any) -> str:
    """JSON text of a dataclass, in the order of its fields; one of a union names its class under "do".

    Fields that are empty by default, a tuple or None, and are empty, are left out.
    """
    return json.dumps(_pack(value, type(value)), indent=1) + "\n"


def decode(text: str, kind: type[T]) -> T:
    """The `kind` that encode wrote."""
    return _unpack(json.loads(text), kind)


@functools.cache
def _fields(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _pack(value: Any, hint: Any) -> Any:
    hint = _given(value, hint)
    args = typing.get_args(hint)
    if hint is FieldKey:
        return str(value)
    if hint == tuple[int, ...]:
        return format_ranks(value)
    if _is_union_of_classes(hint):
        return {"do": type(value).__name__, **_pack(value, type(value))}
    if dataclasses.is_dataclass(hint):
        defaults = {f.name: f.default for f in dataclasses.fields(hint) if f.default in ((), None)}
        skipped = {name for name, default in defaults.items() if getattr(value, name) == default}
        kinds = _fields(typing.cast(type, hint))
        return {
            name: _pack(getattr(value, name), kind) for name, kind in kinds.items() if name not in skipped
        }
    if typing.get_origin(hint) is tuple:
        return [_pack(item, args[0] if args[-1] is ... else args[i]) for i, item in enumerate(value)]
    if typing.get_origin(hint) is dict:
        return {key: _pack(item, args[1]) for key, item in value.items()}
    return value


def _unpack(value: Any, hint: Any) -> Any:
    hint = _given(value, hint)
    args = typing.get_args(hint)
    if hint is FieldKey:
        agent, _, name = value.partition(".")
        return FieldKey(int(agent.removeprefix("agent_")), name)
    if hint == tuple[int, ...]:
        return parse_ranks(value)
    if _is_union_of_classes(hint):
        value = _older_stage(value) if "do" not in value else value
        kind = next(option for option in args if option.__name__ == value["do"])
        return _unpack({name: item for name, item in value.items() if name != "do"}, kind)
    if dataclasses.is_dataclass(hint):
        if "op" in value:
            value = value | {"op": _OLDER_OPS.get(value["op"], value["op"])}
        kinds = _fields(typing.cast(type, hint))
        given: dict[str, Any] = value
        today = {_OLDER.get(name, name): item for name, item in given.items()}
        return typing.cast(type, hint)(**{name: _unpack(item, kinds[name]) for name, item in today.items()})
    if typing.get_origin(hint) is tuple:
        if value is None or isinstance(value, str):  # a stage of an older plan has one follower, or none
            value = () if value is None else (value,)
        return tuple(_unpack(item, args[0] if args[-1] is ... else args[i]) for i, item in enumerate(value))
    if typing.get_origin(hint) is dict:
        return {key: _unpack(item, args[1]) for key, item in value.items()}
    return value


def _given(value: Any, hint: Any) -> Any:
    """The class of a value that may be None, and is not."""
    args = typing.get_args(hint)
    optional = isinstance(hint, types.UnionType) and len(args) == 2 and args[1] is types.NoneType
    return args[0] if optional and value is not None else hint


def _older_stage(value: dict[str, Any]) -> dict[str, Any]:
    """A stage of an interaction as older plans have it: its kind is a field, the rest are options."""
    options = value["options"]
    shared = {name: item for name, item in value.items() if name not in ("kind", "options", "policy", "rows")}
    if value["kind"] == "agent":
        kind = "ProgramStage" if "serve" in options else "AgentStage"
        return {"do": kind, **shared, "policy": value["policy"], "rows": value["rows"], **options}
    uses = {name: item for name, item in options.items() if name.endswith("_with_env")}
    env = {name.removeprefix("env_"): item for name, item in options.items() if name not in uses}
    return {"do": "EnvStage", **shared, **uses, "env": env or None}


def _is_union_of_classes(hint: Any) -> bool:
    return isinstance(hint, types.UnionType) and all(
        dataclasses.is_dataclass(option) for option in typing.get_args(hint)
    )
