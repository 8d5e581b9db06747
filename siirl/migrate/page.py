"""The result of a migration as a script of bash: a command whose settings carry comments."""

import shlex
from collections.abc import Mapping, Sequence

from siirl.migrate.translate import Kind, Translation

WIDTH = 44
KINDS: dict[Kind, str] = {
    "kept": "kept",
    "changed": "changed",
    "added": "added",
    "dropped": "left out",
    "impossible": "cannot be had",
}
HEADINGS: dict[Kind, str] = {
    "impossible": "cannot be had (the command below does without)",
    "dropped": "left out",
}


def page(
    title: str, translation: Translation, left: Mapping[str, tuple[str, ...]], outcome: Sequence[str]
) -> str:
    """The whole text; running it in bash starts the run. outcome: what `siirl check` said, line by line."""
    counts = ", ".join(f"{len(translation.of(kind))} {word}" for kind, word in KINDS.items())
    lines = ["#!/usr/bin/env bash", f"# {title}: {counts}."]
    for kind, heading in HEADINGS.items():
        found = translation.of(kind)
        if found:
            lines += ["#", f"# {heading}:", *(f"#   {one_line(s.there)}: {s.why}" for s in found)]
    if left:
        lines += ["#", "# to fill in:"]
        lines += [f"#   {one_line(text)} in {', '.join(names)}" for text, names in left.items()]
    lines += ["#", *(f"# {one_line(line)}" for line in outcome), "SETTINGS=("]
    for setting in translation.written():
        word = "  " + quoted(f"{setting.name}={setting.value}")
        comment = (
            "" if setting.kind == "kept" else f"  # {_comment(setting.name, setting.there, setting.why)}"
        )
        lines.append(word.ljust(WIDTH) + comment if comment else word)
    options = "".join(f" {shlex.quote(option)}" for option in translation.options)
    lines += [")", f'siirl run{options} "${{SETTINGS[@]}}" "$@"']
    return "\n".join(lines)


def one_line(text: str) -> str:
    """A text without line breaks and control characters, for a comment."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def _comment(name: str, there: str, why: str) -> str:
    """What the script had, its value alone under an equal name, and why it is another here."""
    before = there.lstrip("+").removeprefix(f"{name}=")
    was = f"was {before}" if there else ""
    return one_line(": ".join(filter(None, (was, why))))


def quoted(word: str) -> str:
    """A word for bash, in the quotes that leave it readable."""
    plain = shlex.quote(word)
    return f'"{word}"' if "'" in word and not set(word) & set('"$`\\!') else plain
