"""From a value that somebody wrote to the typed value of a key, or an error that says what is wrong."""

import difflib
import math
import types
import typing
from collections.abc import Iterable
from typing import Any

from siirl.config.keys import Key, Rule
from siirl.config.meant import meant_value
from siirl.errors import ConfigError, NotSupportedError

TYPE_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    types.NoneType: "null",
}
SECRET_KEYS = ("hf_hub_token",)
_LIKE = 0.65
"""Likeness from which one word may be a slip for another, as difflib has it."""


def closest(name: str, known: Iterable[str]) -> str:
    """' Did you mean ...?' for the known name nearest to `name`, or an empty string if none is near."""
    near = closest_name(name, known)
    return f" Did you mean {near!r}?" if near else ""


def closest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name nearest to `name`; None if none is near. A group that both stand in makes none near."""
    names, said = list(known), name.lower()
    tail = said.rpartition(".")[2]
    same_end = [option for option in names if f".{option}".endswith("." + said)]
    same_tail = [option for option in names if option.rpartition(".")[2] == tail]
    like_tail = [option for option in names if _likeness(tail, option.rpartition(".")[2]) >= _LIKE]
    near = (
        same_end
        or difflib.get_close_matches(said, same_tail, 1, 0.4)
        or difflib.get_close_matches(said, like_tail, 1)
    )
    return near[0] if near else None


def _likeness(one: str, other: str) -> float:
    """The share of letters that two words have in common, in order."""
    return difflib.SequenceMatcher(None, one, other).ratio()


def show(key: Key, value: Any) -> str:
    """The value as a user would write it; secrets are not shown."""
    if key.name.endswith(SECRET_KEYS):
        return "***"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return "[" + ",".join(str(item) for item in value) + "]"
    return "''" if value == "" else str(value)


def type_name(annotation: Any) -> str:
    """The type in words, e.g. 'an integer or null'."""
    if annotation in TYPE_NAMES:
        return TYPE_NAMES[annotation]
    arguments = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if origin is tuple:
        item = {int: "integers", float: "numbers", str: "texts"}[arguments[0]]
        return f"a list of {item}" if arguments[-1] is ... else f"a list of {len(arguments)} {item}"
    if origin is dict:
        return "a map"
    return " or ".join(type_name(option) for option in arguments)


def convert(key: Key, value: Any) -> Any:
    """The typed value of `key`; ConfigError if type or range are wrong. Names are for `check_available`."""
    switch = {True: "on", False: "off"}.get(value) if isinstance(value, bool) else None
    if switch in key.rule.synonyms:  # YAML reads an unquoted on or off as true or false
        value = switch
    try:
        typed = _cast(key.type, value)
    except TypeError:
        raise ConfigError(_wrong_type(key, value)) from None
    if isinstance(typed, str):
        typed = key.rule.synonyms.get(typed, typed)
    _check_range(key, typed)
    return typed


def check_available(key: Key, value: Any) -> None:
    """Refuse an unknown name, a replaced key, and (NotSupportedError) what does not exist yet."""
    rule = key.rule
    if rule.later and value != key.default:
        raise NotSupportedError(f"not supported yet: {key.name}={show(key, value)}: {rule.later}.")
    if rule.replaced and value != key.default:
        raise ConfigError(f"{key.name}={show(key, value)}: this key is not used: {rule.replaced}.")
    if not rule.choices:
        return
    if rule.user_code and isinstance(value, str) and ":" in value:
        return
    for name in value if isinstance(value, tuple) else (value,):
        if name in rule.later_choices:
            known = ", ".join(rule.choices)
            raise NotSupportedError(
                f"not supported yet: {key.name}={name}: {rule.later_choices[name]}. Available now: {known}."
            )
        if name is not None and name not in rule.choices:
            known = ", ".join((*rule.choices, *rule.later_choices, *rule.synonyms))
            meant = meant_value(key.name, str(name))
            hint = f" Here it is {meant}." if meant else closest(str(name), known.split(", "))
            own = " A function of your own is file.py:name or pkg.mod:name." if rule.user_code else ""
            raise ConfigError(f"{key.name}={name}: unknown name; the known ones are {known}.{hint}{own}")


def plain(value: Any) -> Any:
    """The value as JSON has it: tuples become lists, maps are copied."""
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return value


def _check_range(key: Key, value: Any) -> None:
    rule = key.rule
    low, high = -math.inf if rule.low is None else rule.low, math.inf if rule.high is None else rule.high
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, bool) or not isinstance(number, int | float):
            continue
        if not math.isfinite(number):
            raise ConfigError(f"{key.name}={show(key, value)}: expected a finite number ({rule.doc}).")
        if number < low or number > high or number == rule.excluded:
            why = "." if rule.excluded is None else f" ({rule.doc}). Set {key.name}={show(key, key.default)}."
            raise ConfigError(f"{key.name}={show(key, value)}: must be {_range_words(rule)}{why}")


def _range_words(rule: Rule) -> str:
    words = {
        "above" if rule.excluded == rule.low else "at least": rule.low,
        "below" if rule.excluded == rule.high else "at most": rule.high,
    }
    if rule.excluded not in (rule.low, rule.high):
        words["not"] = rule.excluded
    numbers = {word: bound for word, bound in words.items() if bound is not None}
    return " and ".join(
        f"{word} {bound if isinstance(bound, int) else format(bound, 'g')}" for word, bound in numbers.items()
    )


def _wrong_type(key: Key, value: Any) -> str:
    hint = " Write null for no value." if isinstance(value, str) and value.lower() == "none" else ""
    expected = f"{type_name(key.type)}{' or auto' if key.rule.auto else ''}"
    return f"{key.name}={show(key, value)}: expected {expected}, got {type(value).__name__}.{hint}"


def _cast(annotation: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        return _cast_union(arguments, value)
    if origin is tuple:
        return _cast_tuple(arguments, value)
    if origin is dict:
        return _cast_map(value)
    if annotation is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not annotation:
        raise TypeError
    return value


def _cast_union(options: tuple[Any, ...], value: Any) -> Any:
    if isinstance(value, str) and value.lower() == "none" and types.NoneType in options:
        raise TypeError
    for option in options:
        try:
            return _cast(option, value)
        except TypeError:
            continue
    raise TypeError


def _cast_tuple(arguments: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    if arguments == (str, ...) and isinstance(value, str):
        value = [value] if value else []
    if not isinstance(value, list | tuple):
        raise TypeError
    if arguments[-1] is ...:
        return tuple(_cast(arguments[0], item) for item in value)
    if len(value) != len(arguments):
        raise TypeError
    return tuple(_cast(option, item) for option, item in zip(arguments, value, strict=True))


def _cast_map(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError
    return {name: _cast_json(item) for name, item in value.items() if _is_text(name)}


def _cast_json(value: Any) -> Any:
    if isinstance(value, dict):
        return _cast_map(value)
    if isinstance(value, list | tuple):
        return [_cast_json(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError


def _is_text(name: Any) -> bool:
    if not isinstance(name, str):
        raise TypeError
    return True
