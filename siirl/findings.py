"""What is wrong with a run, collected by checks that go on after a problem, and told all at once.

A key that was refused holds `Broken`: a check that reads it is left out, as what it says would be noise.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from siirl.errors import Place, UserError, joined

_NODE = re.compile(r"node '([^']+)'")


class ReadsBroken(Exception):
    """A check has read the value of a key that was refused: it has nothing to say until that is mended."""


def _unknown(self: "Broken", *_: object) -> NoReturn:
    raise ReadsBroken(self.key)


class Broken:
    """The value of a key that was refused. Whoever compares, counts, prints or looks into it is left out."""

    def __init__(self, key: str) -> None:
        self.key = key

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __hash__ = _unknown  # type: ignore[assignment]
    __str__ = __format__ = __int__ = __float__ = __index__ = __fspath__ = _unknown  # type: ignore[assignment]
    __iter__ = __len__ = __contains__ = __getitem__ = __getattr__ = __call__ = _unknown
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _unknown
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __neg__ = __or__ = __ror__ = _unknown


@dataclass(frozen=True)
class Check:
    """Something that must hold, which stands beside what it is about. A table gathers those of a room."""

    stage: str
    """After which step of a room's work it is asked."""
    needs: tuple[str, ...]
    """What it is given of what is known then, by name and in this order."""
    run: Callable[..., Iterable[UserError]]
    """Gives all that is wrong, or raises the first of it."""


def refuse(errors: Iterable[UserError]) -> None:
    """Raise what a check gives, as one error, if it gives any."""
    if problems := [*errors]:
        raise joined(problems)


class Findings:
    """The problems found so far, each once."""

    def __init__(self, place: Place = Place.CONFIGURATION) -> None:
        self._place = place
        self._found: dict[str, UserError] = {}

    def __len__(self) -> int:
        return len(self._found)

    @property
    def problems(self) -> list[UserError]:
        """All of them by place; within one by node, in the order in which they were found."""
        found = list(self._found.values())
        nodes: dict[str, int] = {}
        for problem in found:
            nodes.setdefault(_node(problem), len(nodes))
        return sorted(found, key=lambda problem: (problem.place or self._place, nodes[_node(problem)]))

    def add(self, error: UserError, place: Place | None = None) -> None:
        """Keep a problem, or the parts of one; what already has a place keeps it."""
        for problem in error.problems():
            if problem.place is None:
                problem.place = self._place if place is None else place
            self._found.setdefault(str(problem), problem)

    @contextmanager
    def at(self, place: Place | None = None) -> Iterator[None]:
        """A check that ends with its first problem, which is kept: what comes after it goes on."""
        try:
            yield
        except UserError as error:
            self.add(error, place)
        except ReadsBroken:
            pass

    def take(self, errors: Iterable[UserError], place: Place | None = None) -> None:
        """Keep all problems that a check gives."""
        with self.at(place):
            for error in errors:
                self.add(error, place)

    def ask(self, checks: Iterable[Check], stage: str, **known: Any) -> None:
        """Keep what the checks of a stage find, in their order; one that raises does not end the others."""
        for check in checks:
            if check.stage == stage:
                with self.at():
                    self.take(check.run(*(known[name] for name in check.needs)))

    def close(self) -> None:
        """Raise what was found, if anything was."""
        if self._found:
            raise joined(self.problems)


def is_broken(value: Any) -> bool:
    """Whether a value is that of a refused key."""
    return isinstance(value, Broken)


def _node(problem: UserError) -> str:
    found = _NODE.search(str(problem))
    return found[1] if found and problem.place == Place.WORKFLOW else ""
