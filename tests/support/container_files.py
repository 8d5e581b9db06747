"""Reads container recipes: their instructions, and which files of the repository they may copy."""

import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

KEYWORDS = (
    *("FROM", "ARG", "ENV", "RUN", "COPY", "ADD", "WORKDIR", "USER", "CMD", "ENTRYPOINT", "EXPOSE", "LABEL"),
    *("VOLUME", "STOPSIGNAL", "HEALTHCHECK", "SHELL", "ONBUILD"),
)
VARIABLE = re.compile(r"(?<!\\)\$(?:\{(\w+)\}|(\w+))")


class Instruction(NamedTuple):
    """One instruction: continued lines are joined, comments are gone."""

    line: int
    keyword: str
    text: str

    def words(self) -> list[str]:
        """What follows its options (--chown=...)."""
        return [word for word in self.text.split() if not word.startswith("--")]

    def variables(self) -> set[str]:
        """Names that are used in it."""
        return {braced or bare for braced, bare in VARIABLE.findall(self.text)}


def instructions(text: str) -> list[Instruction]:
    """All instructions of a recipe; ValueError where a line is none."""
    found: list[Instruction] = []
    parts: list[str] = []
    start = 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or not line.strip():
            continue
        start = start if parts else number
        parts.append(line.strip().removesuffix("\\").strip())
        if line.rstrip().endswith("\\"):
            continue
        keyword, _, rest = " ".join(parts).partition(" ")
        if keyword not in KEYWORDS or not rest.strip():
            raise ValueError(f"line {start}: {keyword!r} is no instruction with an argument")
        found.append(Instruction(start, keyword, rest.strip()))
        parts = []
    if parts:
        raise ValueError(f"line {start}: the last instruction does not end")
    return found


def undeclared(found: list[Instruction], known: set[str]) -> Iterator[str]:
    """Variables that are used before an ARG or ENV declares them. An ARG before FROM is for FROM alone."""
    declared: set[str] = set()
    for one in found:
        in_shell = set(re.findall(r"\b(\w+)=", one.text)) if one.keyword == "RUN" else set()
        for name in sorted(one.variables() - declared - known - in_shell):
            yield f"line {one.line}: {one.keyword} uses {name}, which is not declared"
        if one.keyword == "FROM":
            declared = set()
        elif one.keyword == "ARG":
            declared |= {word.partition("=")[0] for word in one.words()}
        elif one.keyword == "ENV":
            declared |= set(re.findall(r"(?:^|\s)(\w+)=", one.text))


def is_skipped(name: str, patterns: list[str]) -> bool:
    """Whether .dockerignore's patterns keep a file or folder from the build."""
    parents = [name, *(str(parent) for parent in Path(name).parents)]
    out = False
    for pattern in (line.strip() for line in patterns if line.strip() and not line.startswith("#")):
        wanted = pattern.removeprefix("!").rstrip("/")
        forms = [wanted, wanted.removeprefix("**/")]
        hit = any(fnmatch(one, form) for one in parents for form in forms)
        hit = hit or (pattern.startswith("**/") and any(fnmatch(part, forms[1]) for part in Path(name).parts))
        out = (not pattern.startswith("!")) if hit else out
    return out
