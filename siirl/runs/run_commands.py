"""The commands that find their way among runs, and doctor. Each loads its code when it is called."""

import argparse
import json
from pathlib import Path
from typing import Any

from siirl.command_line import print_text


def add_run_commands(commands: Any) -> None:
    """Add them to the subparsers of `siirl`; each is called with (arguments, overrides)."""
    ls = commands.add_parser("ls", help="list the runs below a folder: state, step, reward, size, command")
    ls.add_argument(
        "folder", nargs="?", default="outputs", metavar="DIR", help="folder to search for runs [outputs]"
    )
    ls.add_argument("--json", action="store_true", help="print a JSON array, an object for each run")
    ls.set_defaults(command=_ls)
    compare = commands.add_parser("compare", help="show how two runs differ: keys, versions, metrics")
    compare.add_argument("runs", nargs=2, metavar="RUN", help="trainer.output_dir of a run")
    compare.add_argument(
        "--all", action="store_true", help="compare all metrics, not only those of the console's table"
    )
    compare.add_argument("--json", action="store_true", help="print one JSON object with all metrics")
    compare.set_defaults(command=_compare)
    watch = commands.add_parser("watch", help="show the state of a run as text, refreshed until it ends")
    watch.add_argument("run", metavar="RUN", help="trainer.output_dir of a run, which may have ended")
    watch.add_argument("--once", action="store_true", help="print the state once and exit")
    watch.add_argument("--every", type=float, default=2.0, metavar="S", help="seconds between refreshes [2]")
    watch.set_defaults(command=_watch)
    audit = commands.add_parser(
        "audit", help="check a run's ledger: what it proves of each row, and what contradicts it"
    )
    audit.add_argument("run", metavar="RUN", help="trainer.output_dir of a run with trainer.ledger=rows")
    audit.add_argument("--row", type=int, metavar="N", help="show all that is known of row number N")
    audit.set_defaults(command=_audit)
    doctor = commands.add_parser("doctor", help="check this machine: what a run would lack, and the fix")
    doctor.add_argument(
        "folder",
        nargs="?",
        default="outputs",
        metavar="DIR",
        help="folder that runs would write to [outputs]",
    )
    doctor.set_defaults(command=_doctor)


def _ls(args: argparse.Namespace, _overrides: list[str]) -> None:
    from siirl.runs.run_list import list_json, list_text
    from siirl.runs.run_text import line_width

    folder = Path(args.folder).expanduser()
    print_text(json.dumps(list_json(folder), indent=1) if args.json else list_text(folder, line_width()))


def _compare(args: argparse.Namespace, _overrides: list[str]) -> None:
    from siirl.runs.run_compare import compare_text, compared
    from siirl.runs.run_state import run_folder
    from siirl.runs.run_text import line_width

    one, two = map(run_folder, args.runs)
    if args.json:
        print_text(json.dumps(compared((one, two)), indent=1, default=str))
    else:
        print_text(compare_text((one, two), args.all, line_width()))


def _watch(args: argparse.Namespace, _overrides: list[str]) -> None:
    from siirl.runs.run_state import run_folder
    from siirl.runs.run_watch import watch

    watch(run_folder(args.run), max(args.every, 0.1), args.once)


def _audit(args: argparse.Namespace, _overrides: list[str]) -> int:
    from siirl.runs.audit import audit, life_of
    from siirl.runs.run_state import run_folder

    folder = run_folder(args.run)
    lines, holds = (life_of(folder, args.row), True) if args.row is not None else audit(folder)
    print_text("\n".join(lines))
    return 0 if holds else 1


def _doctor(args: argparse.Namespace, _overrides: list[str]) -> int:
    from siirl.launch.doctor import examine

    return examine(Path(args.folder).expanduser())
