"""What the shell completes on a command line of siirl: commands and options, keys, and their values.

argcomplete does the talking with the shell; here is what it cannot know.
"""

import argparse
import os
import typing
from collections.abc import Callable

from siirl.config.keys import Key, has_one_value
from siirl.config.root import all_keys

ASKED = "_ARGCOMPLETE"
"""Set by the shell's side of argcomplete where it asks."""


def complete(make_parser: Callable[[], argparse.ArgumentParser]) -> None:
    """Answer the shell and end the process, where it is the shell that asks."""
    if ASKED not in os.environ:
        return
    import argcomplete

    parser = make_parser()
    for sub in _parsers(parser):
        for action in sub._actions:
            if action.dest == "overrides":
                action.completer = settings
    argcomplete.autocomplete(parser, always_complete_options="long")


def settings(prefix: str, **_: object) -> list[str]:
    """Settings that begin with a prefix: `key=` of each key, `key=value` behind one with known values."""
    name, equals, start = prefix.partition("=")
    plain = name.lstrip("+")
    mark = name[: len(name) - len(plain)]
    if not equals:
        return [f"{mark}{key}=" for key in all_keys() if key.startswith(plain)]
    key = all_keys().get(plain)
    return [f"{name}={value}" for value in values(key) if value.startswith(start)] if key else []


def values(key: Key) -> list[str]:
    """What a key may be set to, as text, where that is known; of a list its elements, each by itself."""
    if key.rule.later or key.rule.replaced:
        return []
    if key.rule.choices and not has_one_value(key):
        texts = [str(choice) for choice in key.rule.choices]
        return [f"[{text}]" for text in texts] if typing.get_origin(key.type) is tuple else texts
    types = {key.type, *typing.get_args(key.type)}
    return [*(("true", "false") if bool in types else ()), *(("null",) if type(None) in types else ())]


def _parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """A parser and those of its commands."""
    found = [parser]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += [below for sub in action.choices.values() for below in _parsers(sub)]
    return found
