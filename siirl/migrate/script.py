"""The settings that a launch script hands to siiRL, verl or siirl, found by reading it as bash would."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from siirl.errors import ConfigError
from siirl.migrate.shell_syntax import (
    ASSIGNMENT,
    Array,
    Case,
    Chain,
    Command,
    Function,
    Group,
    If,
    Loop,
    Statement,
    parse,
)
from siirl.migrate.shell_words import UNKNOWN, Variables, expand, expand_text

MODULES = {
    "siirl.main_dag": "siirl",
    "siirl.client.main_dag": "siirl_preset",
    "verl.trainer.main_ppo": "verl",
    "verl.trainer.main_ppo_sync": "verl",
    "verl.trainer.main_ppo_v0": "verl",
}
"""What is run -> whose settings those are: a row of defaults.ORIGINS."""
ASYNCHRONOUS = re.compile(r"(verl\.experimental|recipe)\.(one_step_off|fully_async)_policy\.\w+")
"""verl's asynchronous trainers: their staleness is in the program and in keys that are not translated."""
TESTS = ("[", "[[", "test")
DECLARING = ("export", "local", "declare", "readonly", "typeset")
LENGTH_LIMIT = 2_000_000
DEPTH_LIMIT = 30


@dataclass(frozen=True)
class Launch:
    """The command of a script that starts training."""

    origin: str
    """A row of defaults.ORIGINS."""
    arguments: tuple[str, ...]
    """All that follows the module."""
    variables: Variables
    """As they are at that place."""


def read_script(text: str, given: Mapping[str, str], settings: Sequence[str] = ()) -> Launch:
    """The last training command that the script would run, its arguments expanded.

    given: environment variables. settings: what the user would write behind the script's name. Conditions are
    followed where they are known; one that is not counts as true, unless its branch ends the script, and is
    noted where settings depend on it: a word that it compares is then what it is compared with. A script
    whose functions are never called is read as if each were. ConfigError if there is no training command.
    """
    if len(text) > LENGTH_LIMIT:
        raise ConfigError(
            f"the script has {len(text)} characters: launch scripts are shorter. Check the file."
        )
    reader = _Reader(Variables({"HOME": "~", "PWD": ".", **given}, list(settings)))
    reader.run(parse(text))
    if reader.launch is None:
        for body in list(reader.functions.values()):
            reader.stopped = False
            reader.run(body)
    if reader.launch is None and reader.asynchronous:
        raise ConfigError(
            f"{reader.asynchronous} is a trainer of verl whose rollouts are stale by its own design; its "
            "staleness and its split of the GPUs are not translated, and without them the run would be "
            "synchronous. Migrate the script of verl.trainer.main_ppo with the same settings, and put "
            "actor_rollout_ref.rollout.max_lag=1 (steps of staleness) behind it."
        )
    if reader.launch is None:
        raise ConfigError(_none_found(reader))
    return reader.launch


def _none_found(reader: "_Reader") -> str:
    if not reader.ended:
        return (
            "no training command was found: python -m with one of the modules "
            f"{', '.join(MODULES)}. Name the launch script that calls it."
        )
    said = f", after it says {reader.said!r}" if reader.said else ""
    unset = ", ".join(sorted(reader.variables.empty | reader.variables.tested))
    fix = (
        f"Nobody set {unset}: give it, as in siirl migrate SCRIPT {unset.split(', ')[0]}=..."
        if unset
        else "Is it a launch script?"
    )
    return f"no training command was found: the script ends before, by {reader.ended!r}{said}. {fix}"


class _Reader:
    """Walks statements in the order in which bash would run them."""

    def __init__(self, variables: Variables) -> None:
        self.variables = variables
        self.functions: dict[str, tuple[Statement, ...]] = {}
        self.launch: Launch | None = None
        self.stopped = False
        self.ended = ""
        self.asynchronous = ""
        self.said = ""
        self.depth = 0

    def run(self, statements: Sequence[Statement]) -> bool | None:
        """Run statements in order; the outcome of the last one."""
        outcome: bool | None = True
        for statement in statements:
            if self.stopped:
                return None
            outcome = self.status(statement)
        return outcome

    def status(self, statement: Statement) -> bool | None:
        """Run one statement; True or False where its outcome is known."""
        match statement:
            case Command():
                return self._command(statement)
            case Chain():
                return self._chain(statement)
            case If():
                self._if(statement)
            case Case():
                self._case(statement)
            case Function():
                self.functions[statement.name] = statement.body
            case Group():
                return self.run(statement.body)
            case Loop():
                pass
        return None

    def _chain(self, chain: Chain) -> bool | None:
        outcome: bool | None = True
        for joint, statement in chain.items:
            if (
                self.stopped
                or (joint == "&&" and outcome is False)
                or (joint == "||" and outcome is not False)
            ):
                continue
            if outcome is None and _ends(statement):
                continue
            outcome = self.status(statement)
        return outcome

    def _if(self, statement: If) -> None:
        for condition, body in statement.branches:
            outcome = self.run(condition)
            if outcome is None:
                outcome = not any(map(_ends, body))
                if any(map(_sets, (*body, *statement.otherwise))):
                    self._guess(condition, outcome)
            if outcome:
                self.run(body)
                return
        self.run(statement.otherwise)

    def _guess(self, condition: Sequence[Statement], holds: bool) -> None:
        """Note how a condition that is not known was read."""
        last = condition[-1] if condition else None
        while isinstance(last, Chain) and holds:  # all of it holds: the last part, too
            last = last.items[-1][1]
        parts = [part for part in last.parts if isinstance(part, str)] if isinstance(last, Command) else []
        words = [expand_text(part, self.variables) for part in parts]
        match words:
            case ["[" | "[[" | "test", word, "=" | "==", value, *_] if holds and UNKNOWN.fullmatch(word):
                self.variables.take(word, value)
            case _:
                shown = self.variables.shown(" ".join(words)) or "a condition"
                self.variables.guesses.append(f"{shown}: read as if it {'held' if holds else 'did not hold'}")

    def _case(self, statement: Case) -> None:
        word = expand_text(statement.word, self.variables)
        unknown = bool(UNKNOWN.search(word))
        for patterns, body in statement.branches:
            values = [expand_text(pattern, self.variables) for pattern in patterns]
            taken = any(_matches(word, value) for value in values)
            if taken or (unknown and not any(map(_ends, body))):
                alone = UNKNOWN.fullmatch(word) and len(values) == 1 and not set(values[0]) & set("*?[")
                if alone and _sets(statement):
                    self.variables.take(word, values[0])
                self.run(body)
                return

    def _command(self, command: Command) -> bool | None:
        words: list[str] = []
        read = self.variables.empty
        if command.parts and command.parts[0] in TESTS:
            self.variables.empty = self.variables.tested
        for part in command.parts:
            if isinstance(part, Array):
                self._array(part)
                continue
            found = ASSIGNMENT.fullmatch(part) if not words or words[0] in DECLARING else None
            if found:
                self._assign(found[1], bool(found[2]), found[3])
            else:
                words.extend(expand(part, self.variables))
        self.variables.empty = read
        return self._execute(words)

    def _array(self, array: Array) -> None:
        items = [item for word in array.words for item in expand(word, self.variables)]
        before = self.variables.values.get(array.name, [])
        if array.append:
            items = [*(before if isinstance(before, list) else [before]), *items]
        self.variables.values[array.name] = items

    def _assign(self, name: str, append: bool, word: str) -> None:
        value = expand_text(word, self.variables)
        before = self.variables.values.get(name, "")
        if append and isinstance(before, list):
            self.variables.values[name] = [*before, value]
        else:
            self.variables.values[name] = f"{before}{value}" if append else value

    def _execute(self, words: list[str]) -> bool | None:
        if not words or words[0] in DECLARING:
            return True
        name = words[0]
        origin = next((MODULES[word] for word in words if word in MODULES), None)
        if origin is None and name not in ("echo", "printf"):
            self.asynchronous = next(filter(ASYNCHRONOUS.fullmatch, words), self.asynchronous)
        if name == "eval":
            return self._nested(parse(" ".join(words[1:])))
        if name in TESTS:
            return _test([word for word in words[1:] if word not in ("]", "]]")])
        if name == "!":
            outcome = self._execute(words[1:])
            return None if outcome is None else not outcome
        if name in ("exit", "return", "exec") and origin is None:
            self.stopped, self.ended = True, self.variables.shown(" ".join(words))
            return True
        if name == "shift":
            del self.variables.arguments[: int(words[1]) if words[1:] and words[1].isdigit() else 1]
        elif name == "unset":
            for word in words[1:]:
                self.variables.values.pop(word, None)
        elif name in self.functions:
            outer, self.variables.arguments = self.variables.arguments, words[1:]
            self._nested(self.functions[name])
            self.variables.arguments = outer
            self.stopped = self.stopped and not self.ended.startswith("return")
        elif name in ("echo", "printf"):
            self.said = self.variables.shown(" ".join(words[1:])).strip()
        elif origin is not None:
            place = next(place for place, word in enumerate(words) if word in MODULES)
            self.launch = Launch(origin, tuple(words[place + 1 :]), self.variables)
        return True if name in (":", "true", "echo", "printf", "set", "shift", "unset") else None

    def _nested(self, statements: Sequence[Statement]) -> None:
        if self.depth < DEPTH_LIMIT:
            self.depth += 1
            self.run(statements)
            self.depth -= 1


def _ends(statement: Statement) -> bool:
    """Whether a statement ends the script, as far as its own words say."""
    if isinstance(statement, Command):
        return bool(statement.parts) and statement.parts[0] in ("exit", "return")
    if isinstance(statement, Chain):
        return any(_ends(item) for _, item in statement.items)
    return isinstance(statement, Group) and any(map(_ends, statement.body))


def _sets(statement: Statement) -> bool:
    """Whether a statement sets a variable, as far as its own words say."""
    match statement:
        case Command(parts=(str() as first, *_)):
            return first in DECLARING or ASSIGNMENT.fullmatch(first) is not None
        case Command(parts=parts):
            return bool(parts)
        case Chain(items=items):
            return any(_sets(item) for _, item in items)
        case Group(body=body):
            return any(map(_sets, body))
        case If(branches=branches, otherwise=otherwise):
            return any(map(_sets, (*(item for _, body in branches for item in body), *otherwise)))
        case Case(branches=branches):
            return any(_sets(item) for _, body in branches for item in body)
    return False


def _matches(word: str, pattern: str) -> bool:
    parts = re.split(r"(\*|\?)", pattern)
    regular = "".join({"*": ".*", "?": "."}.get(part, re.escape(part)) for part in parts)
    return re.fullmatch(regular, word, re.DOTALL) is not None


NUMERIC = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
}


def _test(words: list[str]) -> bool | None:
    """The outcome of [ words ], or None if it depends on more than text that is known."""
    if any(UNKNOWN.search(word) for word in words):
        return None
    if words[:1] == ["!"]:
        outcome = _test(words[1:])
        return None if outcome is None else not outcome
    match words:
        case [("-n" | "-z") as sign, *rest] if len(rest) < 2:
            return bool(rest and rest[0]) == (sign == "-n")
        case [text]:
            return bool(text)
        case [left, ("=" | "=="), right]:
            return _matches(left, right)
        case [left, "!=", right]:
            return not _matches(left, right)
        case [left, sign, right] if sign in NUMERIC and _is_whole(left) and _is_whole(right):
            return NUMERIC[sign](int(left), int(right))
    return None


def _is_whole(text: str) -> bool:
    return re.fullmatch(r"-?\d+", text.strip()) is not None
