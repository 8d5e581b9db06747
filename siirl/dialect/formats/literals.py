"""Values as Python, Gemma and templates spell them, and texts that become what a tool's schema wants."""

import json
import math
import re
from typing import Any

from siirl.dialect.formats.call_marks import Malformed, Turn

DEEPEST = 100
"""Values nested more deeply are not read."""
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
WORD = re.compile(r"\w+")
KEY = re.compile(r"[^\s:,{}\[\]'\"<]+")
WORDS = {"True": True, "true": True, "False": False, "false": False}
WORDS |= {"None": None, "null": None}  # type: ignore[dict-item]
GEMMA_QUOTES = ('<|"|>', "<escape>")
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "a": "\a", "v": "\v", "\n": ""}
ESCAPES |= {quote: quote for quote in "\\'\"/"}
ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
CLOSES = re.compile(r"\s*(?:[,)\]}:;]|$|<\|)")
"""What follows a quote that ends a text."""
CLOSING_QUOTE = {quote: re.compile(rf"\\.|{quote}", re.DOTALL) for quote in ("'''", '"""', "'", '"')}


def literal_at(turn: Turn, at: int, depth: int = 0) -> tuple[Any, int]:
    """The value that begins at `at`, blanks before it skipped, and the position behind it; else Malformed.

    Values of Python and JSON in any mixture, texts in Gemma's quotes <|"|>, and keys without quotes.
    """
    if depth > DEEPEST:
        raise Malformed("the values are nested too deeply")
    text, at = turn.text, turn.skip(at)
    first = text[at : at + 1]
    if first in ("[", "("):
        return _list_at(turn, at, "]" if first == "[" else ")", depth)
    if first == "{":
        return _mapping_at(turn, at, depth)
    if first in ("'", '"'):
        return _text_at(turn, at)
    for quote in GEMMA_QUOTES:
        if text.startswith(quote, at):
            return turn.until(quote, at + len(quote), "a text")
    if number := NUMBER.match(text, at):
        return _number(number[0]), number.end()
    word = WORD.match(text, at)
    if word is None or word[0] not in WORDS:
        raise Malformed(f"there is no value at {text[at : at + 20]!r}")
    return WORDS[word[0]], word.end()


def finite(text: str) -> float:
    """A number with a point or an exponent; ValueError for one that is none: NaN, infinite, too large."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is no number of JSON")
    return value


DECODER = json.JSONDecoder(parse_float=finite, parse_constant=finite)


def _number(text: str) -> int | float:
    try:
        return finite(text) if any(letter in text for letter in ".eE") else int(text)
    except ValueError:  # thousands of digits
        raise Malformed("a number is too large") from None


def _list_at(turn: Turn, at: int, end: str, depth: int) -> tuple[list[Any], int]:
    values: list[Any] = []
    at = turn.skip(at + 1)
    while not turn.text.startswith(end, at):
        value, at = literal_at(turn, at, depth + 1)
        values.append(value)
        at = next_at(turn, at, end)
    return values, at + 1


def next_at(turn: Turn, at: int, end: str) -> int:
    """Where the next of several values begins, a comma before it, or their end stands; else Malformed."""
    at = turn.skip(at)
    if turn.text.startswith(",", at):
        return turn.skip(at + 1)
    if not turn.text.startswith(end, at):
        raise Malformed(f"a comma or {end} is missing at {turn.text[at : at + 20]!r}")
    return at


def _mapping_at(turn: Turn, at: int, depth: int) -> tuple[dict[Any, Any], int]:
    values: dict[Any, Any] = {}
    at = turn.skip(at + 1)
    while not turn.text.startswith("}", at):
        if turn.text.startswith(("'", '"', *GEMMA_QUOTES), at):
            name, at = literal_at(turn, at, depth + 1)
        else:
            bare = KEY.match(turn.text, at)
            if bare is None:
                raise Malformed(f"there is no name of a value at {turn.text[at : at + 20]!r}")
            name, at = bare[0], bare.end()
        at = turn.expect(":", turn.skip(at), f"a colon is missing at {turn.text[at : at + 20]!r}")
        values[name], at = literal_at(turn, at, depth + 1)
        at = next_at(turn, at, "}")
    return values, at + 1


def _text_at(turn: Turn, at: int) -> tuple[str, int]:
    """A text in quotes. A quote within it that is not followed by what follows a value belongs to it: some
    templates write texts without escapes.
    """
    text = turn.text
    quote = text[at : at + 3] if text[at : at + 3] in ("'''", '"""') else text[at]
    start = searched = at + len(quote)
    while match := CLOSING_QUOTE[quote].search(text, searched):
        searched = match.end()
        if match[0] == quote and (len(quote) == 3 or CLOSES.match(text, searched)):
            return ESCAPE.sub(_escaped, text[start : match.start()]), searched
    raise Malformed("a text is not closed by its quote")


def _escaped(match: re.Match[str]) -> str:
    spelled = match[1]
    if len(spelled) == 1:
        return ESCAPES.get(spelled, match[0])
    code = int(spelled[1:], 16)
    return chr(code) if code <= 0x10FFFF and not 0xD800 <= code < 0xE000 else "?"


def from_texts(arguments: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Texts as values of the types that the schema of a tool wants; what cannot be read so remains text.

    JSON and Python's spelling are read. Lists and mappings of texts are read by items and properties.
    """
    return _read_by(arguments, schema["function"].get("parameters"))


def _read_by(value: Any, schema: Any) -> Any:
    schema = schema if isinstance(schema, dict) else {}
    if isinstance(value, dict):
        properties, extra = schema.get("properties"), schema.get("additionalProperties")
        properties = properties if isinstance(properties, dict) else {}
        return {name: _read_by(item, properties.get(name, extra)) for name, item in value.items()}
    if isinstance(value, list):
        return [_read_by(item, schema.get("items")) for item in value]
    kinds = kinds_of(schema)
    if not isinstance(value, str) or not kinds or "string" in kinds:
        return value
    if not value.strip() and kinds <= {"array", "object", "null"}:
        return [] if "array" in kinds else {} if "object" in kinds else None
    try:
        return DECODER.decode(value)
    except (ValueError, RecursionError):
        turn = Turn(value)
    try:
        read, end = literal_at(turn, 0)
    except Malformed:
        return value
    return read if turn.skip(end) == len(value) else value


def kinds_of(schema: dict[str, Any]) -> set[str]:
    """The types that a schema allows, also by anyOf, oneOf and the values of enum; empty: any."""
    kinds = schema.get("type")
    found = {kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)}
    if not found:
        for name in ("anyOf", "oneOf"):
            choices = schema.get(name)
            for choice in choices if isinstance(choices, list) else []:
                found |= kinds_of(choice) if isinstance(choice, dict) else set()
    if not found and isinstance(schema.get("enum"), list):
        found = {OF_PYTHON.get(type(value), "string") for value in schema["enum"]}
    return found


OF_PYTHON = {
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
