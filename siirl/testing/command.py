"""`siirl test`: the trial of a command line, and its verdicts as a table."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from siirl.command_line import add_config_arguments, print_text


def add_command(commands: Any) -> None:
    """Add it to the subparsers of `siirl`."""
    told = "test a workflow: run it for a few steps on CPUs with tiny models, and check the rows it trains on"
    parser = commands.add_parser("test", help=told)
    add_config_arguments(parser)
    parser.add_argument(
        "--answers", metavar="FILE", help="scripted responses of the agents: a file, or the folder of a run"
    )
    parser.add_argument(
        "--tiny",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="replace each model by a tiny one of its family [default]; --no-tiny: use the models themselves",
    )
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="folder to keep the test's files in [they are removed]"
    )
    parser.set_defaults(command=_test)


def _test(args: argparse.Namespace, overrides: list[str]) -> int:
    """Prints the table; 1 if an assertion fails or is not done."""
    from siirl.testing.assertions import judged
    from siirl.testing.trial import playing

    with playing(overrides, args.config_name, args.answers, args.tiny, keep=args.keep) as trial:
        verdicts = judged(trial)
    print_text(table_of(verdicts))
    failed, late = (sum(one.status == status for one in verdicts.values()) for status in ("FAIL", "not done"))
    undone = f", {late} not done" if late else ""
    print_text(f"{failed} of {len(verdicts)} assertions failed{undone}, in {trial.seconds:.0f} s")
    return 1 if failed or late else 0


def table_of(verdicts: Mapping[str, Any]) -> str:
    """A line for each assertion, and below one that failed what to change."""
    width, states = max(map(len, verdicts)), max(4, *(len(one.status) for one in verdicts.values()))
    lines = []
    for name, one in verdicts.items():
        lines.append(f"{one.status:{states}}  {name:{width}}  {one.evidence}")
        lines += [f"{'':{states}}  {'':{width}}  | {line}" for line in one.shown.splitlines()]
        if one.fix:
            lines.append(f"{'':{states}}  {'':{width}}  change: {one.fix}")
    return "\n".join(lines)
