"""What a configuration key is: its default, its rule, and the walk over the schema that lists all of them.

A group of keys is a frozen dataclass; each of its fields is made by `key` (a value) or `group` (a nested
group). The dataclasses hold the keys that do something, and are the only place of their defaults and of what
they mean; unused_keys.txt holds those of siiRL that do nothing; everything else is derived from the two.
"""

import copy
import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["supported", "later", "ignored", "replaced"]
AUTO = "auto"
"""What a key that the plan chooses (Rule.auto) is called while nobody sets it."""


@dataclass(frozen=True)
class Rule:
    """What is known of a key beyond its type.

    At most one of later, ignored and replaced is given; a key with none of them is supported.
    """

    doc: str
    """What it means."""
    later: str = ""
    """The feature that does not exist yet: another value than the default is refused."""
    ignored: str = ""
    """Why any value is accepted and changes nothing: setting it warns."""
    replaced: str = ""
    """What to set instead: setting it is refused."""
    when: str = ""
    """The sibling key (or "group.key" from the root) that must be true, or "key=a|b" that must have one of
    the values, for this key to have an effect; of several, joined by " or ", one."""
    within: str = ""
    """The same of its group, from the root."""
    low: float | None = None
    """Least value, of each item of a list."""
    high: float | None = None
    """Greatest value."""
    excluded: float | None = None
    """A value between them, or one of them, that is refused."""
    choices: tuple[str, ...] = ()
    """The allowed names."""
    later_choices: Mapping[str, str] = field(default_factory=dict)
    """Name -> feature that does not exist yet."""
    synonyms: Mapping[str, str] = field(default_factory=dict)
    """Name -> the name that it stands for."""
    user_code: bool = False
    """ "file.py:function" and "pkg.mod:function" are names, too."""
    auto: bool = False
    """Of speed or memory alone: where nobody sets it, or to AUTO, the plan chooses (compiler/choose.py). The
    default is what holds where nothing can be chosen."""

    @property
    def status(self) -> Status:
        if self.later:
            return "later"
        if self.ignored:
            return "ignored"
        return "replaced" if self.replaced else "supported"


def key(default: Any, doc: str, **rule: Any) -> Any:
    """A field that holds a value; keywords are those of `Rule`.

    A default of None on a type without None means that the value follows other keys (see resolve.py).
    """
    metadata = {"rule": Rule(doc, **rule)}
    if isinstance(default, dict):
        return field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def seed_key(default: int | None, doc: str, when: str = "") -> Any:
    """A field that holds a seed, as every generator of a run takes one (NumPy's: 32 bits, no sign)."""
    return key(default, doc, when=when, low=0, high=2**32 - 1)


def group(schema: type, doc: str, when: str = "") -> Any:
    """A field that holds a nested group. when (a key beside the group, or one from the root, which has dots)
    holds for every key below it."""
    return field(default_factory=schema, metadata={"group": Rule(doc, when=when)})


@dataclass(frozen=True)
class Key:
    """One key of the schema: its full dotted name, its type, its default and its rule."""

    name: str
    type: Any
    default: Any
    rule: Rule

    @property
    def is_map(self) -> bool:
        """True for free-form maps, in which any key may be added."""
        return typing.get_origin(self.type) is dict or any(
            typing.get_origin(option) is dict for option in typing.get_args(self.type)
        )

    @property
    def takes_text(self) -> bool:
        """True if a plain string is a valid value, so that a command line need not quote it."""
        options = (
            typing.get_args(self.type) if typing.get_origin(self.type) is types.UnionType else (self.type,)
        )
        return any(option is str or typing.get_args(option) == (str, ...) for option in options)


def has_one_value(key: Key) -> bool:
    """True if only one of the known names of a key exists so far, so that the key decides nothing yet."""
    return len(key.rule.choices) == 1 and bool(key.rule.later_choices)


@functools.cache
def field_types(schema: type) -> dict[str, Any]:
    """Field name -> type of a schema dataclass."""
    return typing.get_type_hints(schema)


def walk(node: Any, prefix: str = "", within: str = "") -> dict[str, Key]:
    """Full name -> Key for every value below an instance of a schema dataclass, in declaration order."""
    keys: dict[str, Key] = {}
    types = field_types(type(node))
    for item in dataclasses.fields(node):
        name, value = prefix + item.name, getattr(node, item.name)
        if "group" in item.metadata:
            when = item.metadata["group"].when
            if when and "." not in when.partition("=")[0]:
                when = prefix + when
            keys.update(walk(value, name + ".", when or within))
        elif "rule" in item.metadata:
            rule = dataclasses.replace(item.metadata["rule"], within=within)
            keys[name] = Key(name, types[item.name], value, rule)
    return keys
