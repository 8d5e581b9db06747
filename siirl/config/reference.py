"""The reference page of the configuration, generated from the schema.

`python -m siirl.config.reference` prints docs/configuration.md.
"""

import textwrap
from collections.abc import Iterator

from siirl.config.aliases import ALIASES
from siirl.config.deviations import DEVIATIONS
from siirl.config.keys import AUTO, Key, has_one_value
from siirl.config.resolve import FOLLOWS
from siirl.config.root import all_keys, get_group_class
from siirl.config.unused_keys import group_docs
from siirl.config.values import show, type_name

HEADER = """\
# Configuration reference

Generated from the schema by `make docs`; do not edit.

A run is configured by `key=value` on the command line, over a preset
(`siirl/config/ppo_dag_trainer.yaml`, or a YAML file of your own given by `--config-name FILE.yaml`),
over the defaults below. `--cfg job` prints the outcome.

- Unknown keys and values of a wrong type are errors that name the closest key.
- A list is written `[a,b]`; a single path may stand for a list of one. `null` is no value.
  `${other.key}` inserts another key.
- Maps are free-form: any key may be set below them, with or without a leading `+`.
- `~key` puts a key that a preset has set back to its default.
- `auto`: the plan chooses, by what memory and packages there are; `siirl plan` says what and why
  (docs/tuning.md). What is set is taken.
- A node of the DAG may override keys for itself (`config:`).

In brackets: the type of a key, and its default. Some keys do nothing. **Later**: known, but its feature
does not exist yet, so any value but the default is refused. **No effect**: accepted, because launch
scripts set it, and answered by a warning. **Older name** of another key. **Replaced**: refused, with the
key to use instead.
"""


def bullet(text: str) -> str:
    """An entry of a list in Markdown, in lines of at most 120 characters where words allow it."""
    return textwrap.fill(
        f"- {text}", 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def reference_page() -> str:
    """The text of docs/configuration.md."""
    parts = [HEADER, *_sections(), _deviations()]
    return "\n".join(parts)


def _sections() -> Iterator[str]:
    """A list for each group of keys, a group before those below it."""
    below: dict[str, list[str]] = {}
    for name in _places():
        below.setdefault(name.rpartition(".")[0], []).append(name)
    waiting = below[""][::-1]
    while waiting:
        name = waiting.pop()
        waiting += below.get(name, [])[::-1]
        keys = [key for key in all_keys().values() if key.name.rpartition(".")[0] == name]
        if keys:
            entries = "\n".join(map(_entry, keys))
            acts = dict.fromkeys(f" Acts with `{key.rule.within}`." for key in keys if key.rule.within)
            yield f"## {name}\n\n{_about(name)}{''.join(acts)}\n\n{entries}\n"


def _places() -> dict[str, None]:
    """All groups, in the order of their keys."""
    parts = (name.split(".")[:-1] for name in all_keys())
    return dict.fromkeys(".".join(groups[:end]) for groups in parts for end in range(1, len(groups) + 1))


def _about(group: str) -> str:
    """What a group holds."""
    if group in group_docs():
        return group_docs()[group]
    schema = get_group_class(group)
    return str(schema.__doc__) if schema else "An older place of keys: the status says where they are."


def _entry(key: Key) -> str:
    rule, last = key.rule, key.name.rsplit(".", 1)[-1]
    if key.name in ALIASES:
        return bullet(f"`{last}`: another name of {' and '.join(f'`{name}`' for name in ALIASES[key.name])}.")
    meaning = rule.doc
    if rule.choices and not has_one_value(key):
        meaning += f"; one of {', '.join(f'`{name}`' for name in rule.choices)}"
    if rule.when:
        meaning += f"; acts with `{rule.when}`"
    return bullet(f"`{last}` ({type_name(key.type)}, {_default(key)}): {meaning}.{_status(key)}")


def _default(key: Key) -> str:
    if key.name in FOLLOWS:
        return f"`{FOLLOWS[key.name]}`"
    if key.rule.auto:
        return f"`{AUTO}`"
    return f"`{show(key, key.default)}`"


def _status(key: Key) -> str:
    """What the entry of a key says besides its meaning."""
    rule = key.rule
    if rule.later:
        return f" **Later**: {rule.later}."
    if rule.ignored:
        return f" **No effect**: {rule.ignored}."
    if rule.replaced:
        return f" **Replaced**: {rule.replaced}."
    later = ", ".join(f"`{name}`" for name in rule.later_choices)
    if has_one_value(key):
        return f" Only `{rule.choices[0]}` so far (later: {later})."
    return f" Later: {later}." if later else ""


def _deviations() -> str:
    entries = [
        bullet(f"`{key.name}`: `{show(key, item.reference)}` there, {_default(key)} here: {item.reason}.")
        for key, item in ((all_keys()[name], item) for name, item in DEVIATIONS.items())
    ]
    return "\n".join(("## Defaults that differ from siiRL's\n", *entries, ""))


if __name__ == "__main__":
    print(reference_page(), end="")
