"""Keys of siiRL that do nothing here: the data of unused_keys.txt, which says how it is written."""

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from siirl.config.keys import Key, Rule

TYPES: dict[str, Any] = {
    "bool": bool,
    "int": int,
    "float": float,
    "text": str,
    "int?": int | None,
    "text?": str | None,
    "ints": tuple[int, ...],
    "texts": tuple[str, ...],
    "text or texts": str | tuple[str, ...],
    "map": dict[str, Any],
}
STATUSES = ("later", "no effect", "replaced")


@functools.cache
def unused_keys() -> dict[str, Key]:
    """Full name -> Key of every such key. Treat as read-only."""
    return _read()[0]


@functools.cache
def group_docs() -> dict[str, str]:
    """What a group holds, for groups that have no other keys."""
    return _read()[1]


@functools.cache
def _read() -> tuple[dict[str, Key], dict[str, str]]:
    keys: dict[str, Key] = {}
    docs: dict[str, str] = {}
    groups: list[str] = []
    rule, in_header = Rule(""), False
    for line in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            names, _, doc = line[1:].partition("]")
            groups = [*(groups if in_header else ()), *names.split()]
            if doc:
                docs[groups[0]] = doc.strip()
        elif line.startswith(" "):
            name, type_name, default, doc = line.strip().split(" | ", 3)
            value = json.loads(default)
            value = tuple(value) if isinstance(value, list) else value
            for group in groups:
                full = f"{group}.{name}"
                keys[full] = Key(full, TYPES[type_name], value, replace(rule, doc=doc))
        else:
            status, _, reason = line.partition(": ")
            said = dict.fromkeys(STATUSES, "") | {status: reason}
            later, ignored, replaced = (said.pop(name) for name in STATUSES)
            assert not said, f"{status!r} is no status"
            rule = Rule("", later=later, ignored=ignored, replaced=replaced)
        in_header = line.startswith("[")
    return keys, docs
