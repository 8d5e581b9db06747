"""The lists of docs/migration_reference.md, written from siirl.config.foreign.

`python tools/migration_page.py FILE` puts them between the two marks of the file.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from configuration_pages import bullet

from siirl.config.foreign import FOREIGN, OTHER_DEFAULTS, Foreign
from siirl.config.resolve import get
from siirl.config.root import all_keys
from siirl.config.tree import default_config
from siirl.config.values import show
from siirl.migrate.defaults import OWN

BEGIN, END = "<!-- lists of siirl.config.foreign: begin -->", "<!-- end -->"


def lists() -> str:
    """Both lists: keys that have another name or no place here, and defaults that differ."""
    return "\n".join(["Key there: key here.", "", *_keys(), "", "Defaults that differ.", "", *_defaults()])


def with_lists(text: str) -> str:
    """The document with its lists as they are now."""
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n{lists()}\n{END}{rest.partition(END)[2]}"


def _keys() -> Iterator[str]:
    for name, entry in FOREIGN.items():
        yield bullet(f"`{name}`: {_becomes(entry)}.")


def _becomes(entry: Foreign) -> str:
    if entry.here:
        return f"`{entry.here}`" + (f" ({entry.why})" if entry.why else "")
    if entry.harmless:
        return f"skipped: {entry.why}"
    values = ", ".join(f"`{value}`" for value in entry.asks_nothing if value)
    return f"not supported{f' (but {values})' if values else ''}: {entry.why}"


def _defaults() -> Iterator[str]:
    for name, other in OTHER_DEFAULTS.items():
        ours = OWN.get(name) or show(all_keys()[name], get(default_config(), name))
        where = {"verl": other.verl, "siiRL": other.siirl, "siiRL's preset": other.preset}
        values = {place: _shown(name, value) for place, value in where.items() if value is not None}
        there = ", ".join(f"{value} in {place}" for place, value in values.items())
        if len(values) > 1 and len(set(values.values())) == 1:
            there = f"{values.popitem()[1]} in {'all' if len(values) == 2 else 'verl and in the preset'}"
        yield bullet(f"`{name}`: {ours} here, {there} ({other.changes}).")


def _shown(name: str, value: Any) -> str:
    if isinstance(value, str):
        return f"follows `{value[2:-1]}`"
    return show(all_keys()[name], value)


if __name__ == "__main__":
    document = Path(sys.argv[1])
    document.write_text(with_lists(document.read_text(encoding="utf-8")), encoding="utf-8")
