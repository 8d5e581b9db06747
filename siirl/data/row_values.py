"""Values of rows as people write them, to values that rows carry: chats, right answers, JSON. No torch."""

import ast
import datetime
import json
import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

import pyarrow as pa

from siirl.errors import DataError
from siirl.observe.printable import encodable

_CELL = "__json__"
JSON_TYPE = pa.struct([(_CELL, pa.string())])
"""Of a column whose cells are JSON: any value, with the keys that were written and no others."""

Messages = list[dict[str, Any]]

SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""`from` of a ShareGPT message -> the role of a chat message."""
OTHER_ROLES = ("human", "gpt", "chatgpt", "bot")
"""Roles that no chat template knows, and that mean one that all do."""
SAID_AS = ("value", "text")
"""Names of the content of a message in other forms."""
KEPT = ("name", "tool_calls")
TEXT_PARTS = ("text", "input_text", "output_text")
IMAGE_PLACE = "<image>"


def is_json(kind: pa.DataType) -> bool:
    """Whether the cells of a column of this type are JSON."""
    return kind == JSON_TYPE


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type holds texts."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def is_list(kind: pa.DataType) -> bool:
    """Whether a column of this type holds lists."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def as_json_cell(value: Any) -> dict[str, str]:
    """A value as a cell of JSON_TYPE."""
    return {_CELL: json.dumps(value)}


def json_cells(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column of JSON texts as a column of JSON_TYPE; null stays null."""
    chunks = [
        pa.StructArray.from_arrays([chunk.cast(pa.string())], fields=[*JSON_TYPE], mask=chunk.is_null())
        for chunk in texts.chunks
    ]
    return pa.chunked_array(chunks, JSON_TYPE)


def plain(value: Any, where: str = "") -> Any:
    """A value of Arrow as JSON has it: cells of JSON read, dates and times as ISO text, decimals as numbers.

    DataError, with `where`, for a cell that is no JSON.
    """
    match value:
        case str() | int() | float() | None:
            return value
        case dict():
            if value.keys() == {_CELL}:
                return None if value[_CELL] is None else read_json(value[_CELL], where)
            return {key: plain(item, where) for key, item in value.items()}
        case list():
            return [plain(item, where) for item in value]
        case datetime.datetime() | datetime.date() | datetime.time():
            return value.isoformat()
        case datetime.timedelta():
            return value.total_seconds()
        case Decimal():
            return _number(value)
    return value


def _number(value: Decimal) -> int | float | str:
    """A decimal as a number, 7 for 7.00; as text if no number of JSON is it."""
    if value.is_finite() and value == value.to_integral_value():
        return int(value)
    near = float(value)
    return near if Decimal(repr(near)) == value else str(value)


def read_json(text: str, where: str) -> Any:
    """The value that a text holds. DataError, with `where`, if it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is no JSON: {error}. It begins {text[:40]!r}; mend the row.") from error


def values_of(table: pa.Table, name: str, where: str = "") -> list[Any]:
    """The values of a column, as `plain` gives them. where: what it calls the file of the table."""
    values = table[name].to_pylist()
    kind = table.schema.field(name).type
    if not (pa.types.is_nested(kind) or pa.types.is_temporal(kind) or pa.types.is_decimal(kind)):
        return values
    return [plain(value, f"{where}, row {row}: column {name!r}") for row, value in enumerate(values)]


def chat_of(value: Any, where: str, images: bool = False) -> str | Messages:
    """The prompt of a row: a text, or messages {role, content, ...} whose content is text.

    value: a text; messages; messages whose content is a list of parts, of which texts are put together and
    images become <image>; or messages of ShareGPT, {from, value}. Keys without a value are left out, at any
    depth: a column of structs has them in every row. images: whether parts may be {type: image}.
    DataError, with `where`, for anything else.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        value = next((value[name] for name in ("messages", "conversations") if name in value), value)
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        raise DataError(
            f"{where} is {_kind(value)}: a prompt is a text, or a list of messages {{role, content}}. "
            "Convert it, or name another column by data.columns.prompt."
        )
    return [_message(turn, f"{where}, message {number + 1}", images) for number, turn in enumerate(value)]


def _message(turn: Mapping[str, Any], where: str, images: bool) -> dict[str, Any]:
    turn = without_nulls(turn)
    if "role" not in turn and "from" in turn:
        speaker = str(turn["from"]).lower()
        if speaker not in SPEAKERS:
            raise DataError(
                f"{where} is from {turn['from']!r}, which is none of {', '.join(SPEAKERS)}. Write it as "
                "{role, content}."
            )
        turn = {"role": SPEAKERS[speaker], **{key: item for key, item in turn.items() if key != "from"}}
        turn = {key: item for key, item in turn.items() if key in ("role", "content", *SAID_AS, *KEPT)}
    if "content" not in turn and (said := next((name for name in SAID_AS if name in turn), None)):
        turn = {("content" if key == said else key): item for key, item in turn.items()}
    if not isinstance(turn.get("role"), str) or not turn["role"]:
        raise DataError(
            f"{where} has no role: it has {', '.join(turn) or 'nothing'}. Write it as {{role, content}}."
        )
    if turn["role"] in OTHER_ROLES:
        turn = {**turn, "role": SPEAKERS[turn["role"]]}
    content = turn.get("content")
    if isinstance(content, list):
        turn = {**turn, "content": "".join(_part(part, where, images) for part in content)}
    elif content is None:
        if not turn.get("tool_calls"):
            raise DataError(f"{where}, of {turn['role']}, has no content. Fill it in, or remove the row.")
    elif not isinstance(content, str):
        raise DataError(
            f"{where} has {_kind(content)} as content: it is a text, or a list of parts. Convert it."
        )
    content = turn.get("content")
    return {**turn, "content": encodable(content)} if isinstance(content, str) else turn


def _part(part: Any, where: str, images: bool) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, str):
        return part
    if kind in TEXT_PARTS or (kind is None and isinstance(part, dict) and "text" in part):
        return str(part.get("text") or "")
    if part == {"type": "image"} and images:
        return IMAGE_PLACE
    named = f"of type {kind!r}" if kind else _kind(part)
    raise DataError(
        f"{where} has a part {named}: parts are {{type: text, text: ...}} and, with data.dataset_type=vlm, "
        "{type: image} for each image of the column data.image_key. Put images there, leave out other parts."
    )


def without_nulls(value: Any) -> Any:
    """The value without the keys of objects that hold null, at any depth; items of lists stay."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


CHAT_TEXT = r"""^\s*\[?\s*\{\s*['"](role|from|content|value|messages)['"]\s*:"""
"""How a text begins that may be a chat."""
CHAT_START = re.compile(CHAT_TEXT)


def written_chat(text: str) -> str | None:
    """The notation, "json" or "python", of a text that is a chat; it begins as CHAT_TEXT does. Else None."""
    for name, read in (("json", json.loads), ("python", ast.literal_eval)):
        try:
            value = read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        turns = value.get("messages", [value]) if isinstance(value, dict) else value
        if isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns):
            return name if any({"role", "from"} & turn.keys() for turn in turns) else None
    return None


def truth_of(cell: Any) -> Any:
    """The right answer in a cell of the column reward_model; None where there is none.

    NaN, which pandas writes for a value that is missing, is none, and so are lists of nothing else.
    """
    if isinstance(cell, Mapping):
        return None if is_missing(found := cell.get("ground_truth")) else found
    return None


def is_missing(value: Any) -> bool:
    """Whether a right answer says nothing: null, NaN, an empty list, or a list of these."""
    if isinstance(value, float):
        return math.isnan(value)
    if isinstance(value, list | tuple):
        return all(is_missing(item) for item in value)
    return value is None or value == {}


def is_blank(truth: Any) -> bool:
    """Whether a right answer, as `truth_of` gives it, is none or an empty text."""
    return truth is None or (isinstance(truth, str) and not truth.strip())


def value_at(value: Any, path: str) -> Any:
    """What stands in an object under a dotted name; the object itself for none, None where there is none."""
    for name in path.split(".") if path else ():
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def text_bytes(value: Any) -> Iterator[int]:
    """The bytes of all texts within a value, keys too: what a template may write of a message."""
    if isinstance(value, str):
        yield len(value.encode(errors="replace"))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield len(str(key))
            yield from text_bytes(item)
    elif isinstance(value, list):
        for item in value:
            yield from text_bytes(item)
    elif value is not None:
        yield len(str(value))


def _kind(value: Any) -> str:
    return {dict: "a map", list: "a list", type(None): "empty"}.get(type(value), f"{value!r:.40}")
