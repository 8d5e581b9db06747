"""The tables of docs/migration.md, written from siirl.config.foreign.

`python -m siirl.migrate.document FILE` puts them between the two marks of the file.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from siirl.config.foreign import FOREIGN, OTHER_DEFAULTS, Foreign
from siirl.config.resolve import get
from siirl.config.root import all_keys
from siirl.config.tree import default_config
from siirl.config.values import show

BEGIN, END = "<!-- tables of siirl.config.foreign: begin -->", "<!-- end -->"


def tables() -> str:
    """Both tables: keys that have another name or no place here, and defaults that differ."""
    return "\n".join([*_keys(), "", *_defaults()])


def with_tables(text: str) -> str:
    """The document with its tables as they are now."""
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n{tables()}\n{END}{rest.partition(END)[2]}"


def _keys() -> Iterator[str]:
    yield "| key there | here |"
    yield "|---|---|"
    for name, entry in FOREIGN.items():
        yield f"| `{name}` | {_becomes(entry)} |"


def _becomes(entry: Foreign) -> str:
    if entry.here:
        return f"`{entry.here}`" + (f": {entry.why}" if entry.why else "")
    if entry.harmless:
        return f"left out: {entry.why}"
    values = ", ".join(f"`{value}`" for value in entry.asks_nothing if value)
    return f"cannot be had{f' (but {values})' if values else ''}: {entry.why}"


def _defaults() -> Iterator[str]:
    yield "| key | verl | siiRL's preset | siirl | what differs |"
    yield "|---|---|---|---|---|"
    for name, other in OTHER_DEFAULTS.items():
        ours = show(all_keys()[name], get(default_config(), name))
        there = " | ".join(_shown(name, value) for value in (other.verl, other.siirl))
        yield f"| `{name}` | {there} | {ours} | {other.changes} |"


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "the same"
    if isinstance(value, str):
        return f"follows `{value[2:-1]}`"
    return show(all_keys()[name], value)


if __name__ == "__main__":
    document = Path(sys.argv[1])
    document.write_text(with_tables(document.read_text(encoding="utf-8")), encoding="utf-8")
