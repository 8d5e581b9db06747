"""Command lines of key=value settings, and the edge where a user error becomes a message and exit code 2."""

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from siirl.errors import UserError

EXIT_USER_ERROR = 2
MODULE = "python -m siirl.main_dag"
DEFAULT_CONFIG = "ppo_dag_trainer"


@dataclass(frozen=True)
class Arguments:
    """What the main job's command line says."""

    overrides: tuple[str, ...]
    config_name: str
    cfg: str | None
    """ "job": print the composed configuration instead of running."""


@dataclass
class Outcome:
    """How a command ends."""

    code: int = 0
    """The exit code so far; 2 after a user error."""


def parse_arguments(argv: Sequence[str] | None = None, prog: str = MODULE) -> Arguments:
    """The arguments of the main job, called prog. Exits with 2 and the usage if an option is unknown."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Check the settings, compile the workflow to a plan, and run it.",
        epilog="Settings are key=value, as in data.train_batch_size=64; docs/configuration/ lists them.",
    )
    add_config_arguments(parser)
    parser.add_argument("--cfg", choices=("job",), help="print the whole configuration and exit")
    args, overrides = parse_settings(parser, argv)
    return Arguments(tuple(overrides), args.config_name, args.cfg)


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that every command with a configuration takes."""
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings; +key=value adds to a map"
    )
    parser.add_argument(
        "--config-name",
        "-cn",
        default=DEFAULT_CONFIG,
        metavar="NAME",
        help=f"preset, or a YAML file [{DEFAULT_CONFIG}]",
    )
    parser.add_argument(
        "--config-path", "-cp", metavar="FOLDER", help="folder of the YAML file that --config-name names"
    )


def parse_settings(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> tuple[argparse.Namespace, list[str]]:
    """(arguments, settings): settings stand anywhere among options. Exits with code 2 for unknown options."""
    args, rest = parser.parse_known_args(argv)
    options = [item for item in rest if item.startswith("-")]
    if options or (rest and not hasattr(args, "overrides")):
        word = (options or rest)[0]
        plain = f": settings have no dashes, as {word.lstrip('-')}" if "=" in word else ""
        parser.error(f"unknown argument {word!r}{plain}")
    if getattr(args, "config_path", None) is not None:
        suffix = "" if args.config_name.endswith((".yaml", ".yml")) else ".yaml"
        args.config_name = str(Path(args.config_path) / f"{args.config_name}{suffix}")
    return args, [*getattr(args, "overrides", []), *rest]


def import_from_here() -> None:
    """Have modules of the user's found in the working directory, by whatever name the program was started.

    `python -m` does that by itself; a console script has its own folder there. Last, so that no file there is
    taken for a module of a package; and by commands that run the user's code, not by those that read folders.
    """
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)


def print_text(text: str) -> None:
    """Print a text of many lines; a reader who has seen enough of it (`| head`) is no error."""
    with readers_may_leave():
        print(text, flush=True)


@contextmanager
def readers_may_leave() -> Iterator[None]:
    """Inside, what this process prints goes nowhere once the reader of its output has gone (`| head`)."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Unbroken(sys.stdout), _Unbroken(sys.stderr)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout, sys.stderr = before


class _Unbroken:
    """A text stream that drops what nobody reads any more."""

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, act: Callable[[], Any]) -> None:
        try:
            act()
        except BrokenPipeError:  # what is still buffered goes nowhere, or Python would complain at its exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def cleaning_up() -> Iterator[None]:
    """SIGTERM and SIGHUP end what is in the block as an exit does: its temporary folders go."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, end) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def user_errors() -> Iterator[Outcome]:
    """Reports a UserError raised inside as its message alone; HYDRA_FULL_ERROR=1 adds the traceback.

    Several problems are a list, under the places where they were written.
    """
    outcome = Outcome()
    try:
        yield outcome
    except UserError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            traceback.print_exc()
        print(_told(error), file=sys.stderr)
        outcome.code = EXIT_USER_ERROR


def _told(error: UserError) -> str:
    problems = error.problems()
    if len(problems) == 1:
        return f"{type(problems[0]).__name__}: {problems[0]}"
    lines, place = [f"{len(problems)} problems:"], None
    for problem in problems:
        if problem.place != place:
            place = problem.place
            lines.append(f"{place}:")
        lines.append("  - " + str(problem).replace("\n", "\n    "))
    return "\n".join(lines)
