"""Schemas of tools in OpenAI's function format, and arguments that are checked against them, in words."""

import json
import math
from typing import Any

from siirl.errors import ConfigError

TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def function_schema(name: str, description: str, properties: dict[str, Any], required: list[str]) -> dict:
    """A schema in OpenAI's function format."""
    parameters = {"type": "object", "properties": properties, "required": required}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def check_schema(schema: Any, who: str) -> None:
    """ConfigError unless `schema` is a function in OpenAI's format, of types that arguments can have."""
    function = schema.get("function") if isinstance(schema, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ConfigError(
            f"{who}: the tool schema {schema!r} is no function. Write {{type: function, function: {{name, "
            "description, parameters: {type: object, properties, required}}}."
        )
    parameters = function.get("parameters", {"type": "object"})
    where = f"{who}: tool {function['name']!r}"
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise ConfigError(f"{where}: its parameters are no object. Write parameters: {{type: object, ...}}.")
    _check_types(parameters, where)
    properties, required = parameters.get("properties") or {}, parameters.get("required") or []
    unknown = [name for name in required if name not in properties]
    if unknown:
        raise ConfigError(f"{where}: required {unknown} are no properties. Declare them, or leave them out.")


def _check_types(schema: dict[str, Any], where: str) -> None:
    kinds = schema.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if not isinstance(kind, str) or kind not in TYPES:
            raise ConfigError(f"{where}: unknown type {kind!r}. Choose of {', '.join(TYPES)}.")
    _check_bounds(schema, where)
    properties = schema.get("properties") or {}
    if not isinstance(properties, dict):
        raise ConfigError(f"{where}: properties = {properties!r} is no mapping of names to schemas.")
    inner = {**properties, **({"items": schema["items"]} if "items" in schema else {})}
    for name, value in inner.items():
        if not isinstance(value, dict):
            raise ConfigError(
                f"{where}: the schema of {name!r} is {value!r}, no mapping. Write {{type: ...}}."
            )
        _check_types(value, f"{where}: {name}")


def _check_bounds(schema: dict[str, Any], where: str) -> None:
    """ConfigError for bounds that no value can be held against."""
    for name in ("minimum", "maximum"):
        bound = schema.get(name, 0)
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            raise ConfigError(f"{where}: {name} = {bound!r} is no number. Correct it.")
    for name in ("enum", "required"):
        if not isinstance(schema.get(name) or [], list):
            raise ConfigError(f"{where}: {name} = {schema[name]!r} is no list. Write {name}: [a, b].")
    kinds = _kinds(schema)
    for value in schema.get("enum") or []:
        if kinds and not any(_is(value, kind) for kind in kinds):
            raise ConfigError(
                f"{where}: enum has {_shown(value)}, which is no {' or '.join(kinds)}: no call could use it. "
                "Write it so (YAML reads 1 as a number, "
                '"1" as text), or change the type.'
            )


def argument_errors(arguments: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    """What is wrong with the arguments of a call, one sentence each; none if they fit the schema.

    Knows type, enum, minimum, maximum, required, properties, additionalProperties and items; an argument
    that the schema does not name is an error unless additionalProperties allows it.
    """
    parameters = schema["function"].get("parameters") or {}
    return _object_errors(arguments, {"additionalProperties": False, **parameters}, "")


def _errors(value: Any, schema: dict[str, Any], name: str) -> list[str]:
    kinds = _kinds(schema)
    if kinds and not any(_is(value, kind) for kind in kinds):
        return [f"{name} must be {' or '.join(kinds)}, not {_shown(value)}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{name} must be one of {', '.join(map(_shown, schema['enum']))}, not {_shown(value)}"]
    if isinstance(value, int | float) and not isinstance(value, bool):
        if value < schema.get("minimum", -math.inf):
            return [f"{name} must be at least {schema['minimum']}, not {_shown(value)}"]
        if value > schema.get("maximum", math.inf):
            return [f"{name} must be at most {schema['maximum']}, not {_shown(value)}"]
    if isinstance(value, list) and "items" in schema:
        return [
            error
            for index, item in enumerate(value)
            for error in _errors(item, schema["items"], f"{name}[{index}]")
        ]
    return _object_errors(value, schema, f"{name}.") if isinstance(value, dict) else []


def _object_errors(value: dict[str, Any], schema: dict[str, Any], prefix: str) -> list[str]:
    properties = schema.get("properties") or {}
    errors = [f"{prefix}{name} is missing" for name in schema.get("required") or () if name not in value]
    extra = schema.get("additionalProperties", True)
    for name, item in value.items():
        if name in properties:
            errors += _errors(item, properties[name], f"{prefix}{name}")
        elif extra is False:
            errors.append(f"{prefix}{name} is no argument of it ({', '.join(properties) or 'it has none'})")
        elif isinstance(extra, dict):
            errors += _errors(item, extra, f"{prefix}{name}")
    return errors


def _kinds(schema: Any) -> list[str]:
    """The types that a schema allows; none if it does not say, or is no schema."""
    kinds = schema.get("type") if isinstance(schema, dict) else None
    return [kinds] if isinstance(kinds, str) else list(kinds) if isinstance(kinds, list) else []


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, TYPES[kind])


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
