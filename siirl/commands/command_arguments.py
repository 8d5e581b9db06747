"""The commands that go on with a run or begin one. Each loads its code when it is called."""

import argparse
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from siirl.command_line import DEFAULT_CONFIG, print_text
from siirl.errors import ConfigError

PROJECT = "project"


def write_project(folder: Path) -> str:
    """Copy the project into a folder that is new or empty; what to do next. ConfigError if it is neither."""
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(
                f"{folder} is there and not empty: nothing is overwritten. Choose a new folder."
            )
        folder.mkdir(parents=True, exist_ok=True)
        for source in sorted(files("siirl.commands").joinpath(PROJECT).iterdir(), key=lambda path: path.name):
            if source.name.endswith(".txt"):  # no Python of ours: it is the user's when it is written
                target = folder / source.name.removesuffix(".txt")
                target.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
                if target.suffix == ".sh":
                    target.chmod(0o755)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}. Choose another folder.") from error
    return (
        f"wrote {folder.absolute()}. Next:\n  cd {folder}\n  python prepare.py      # data and a tiny model\n"
        "  ./run.sh --check       # what a run would refuse\n"
        "  python -m pytest -q    # the reward and the environment\n"
        "  ./run.sh               # train, about a minute on a CPU"
    )


def add_commands(commands: Any) -> None:
    """Add them to the subparsers of `siirl`; each is called with (arguments, overrides)."""
    new = commands.add_parser("new", help="make a project to begin with: workflow, reward, environment, test")
    new.add_argument("folder", metavar="DIR", help="the folder to make: a new one, or an empty one")
    new.set_defaults(command=_new)
    resume = commands.add_parser(
        "resume", help="continue a run from its last checkpoint, with its own settings"
    )
    resume.add_argument("run", metavar="RUN", help="trainer.output_dir of a run")
    resume.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change")
    trust = {
        "action": "store_true",
        "help": "run the code that the run's folder names, even if other users can change it",
    }
    resume.add_argument("--trust", **trust)
    resume.set_defaults(command=_resume)
    amend = commands.add_parser("amend", help="change settings of a run while it goes on, from its next step")
    amend.add_argument(
        "run", metavar="RUN", help="trainer.output_dir of a run on this machine that has not ended"
    )
    amend.add_argument("overrides", nargs="+", metavar="key=value", help="settings to change")
    amend.add_argument("--trust", **trust)
    amend.set_defaults(command=_amend)
    evaluate = commands.add_parser("eval", help="validate a checkpoint or a model: rewards, pass@k")
    evaluate.add_argument(
        "model", metavar="MODEL", help="folder of a run, of a checkpoint (global_step_N), or of a model"
    )
    evaluate.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change")
    evaluate.add_argument(
        "--config-name",
        "-cn",
        metavar="NAME",
        help=f"preset, or a YAML file [the run's, or {DEFAULT_CONFIG}]",
    )
    evaluate.add_argument("--samples", type=int, metavar="N", help="responses to sample for each prompt")
    evaluate.add_argument(
        "--right",
        type=float,
        default=1.0,
        metavar="R",
        help="least reward of a right response, for pass@k [1]",
    )
    evaluate.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for the results [outputs/eval/MODEL_TIME]"
    )
    evaluate.add_argument("--json", action="store_true", help="print the results as one JSON object")
    evaluate.add_argument("--trust", **trust)
    evaluate.set_defaults(command=_eval)
    chat = commands.add_parser("chat", help="talk to a model, or to the agents of a checkpoint, on the CPU")
    chat.add_argument(
        "model", metavar="MODEL", help="folder of a run, of a checkpoint (global_step_N), or of a model"
    )
    chat.add_argument("--agent", metavar="NAME", help="the agent to talk to, e.g. agent_0 [the first]")
    chat.add_argument("--system", default="", metavar="TEXT", help="system prompt")
    chat.add_argument(
        "--temperature", type=float, default=0.7, help="sampling temperature; 0: the likeliest token [0.7]"
    )
    chat.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="most tokens of an answer [as in the run that trained it, else 512]",
    )
    chat.add_argument("--seed", type=int, default=0, help="seed of sampling [0]")
    chat.set_defaults(command=_chat)


def _new(args: argparse.Namespace, _overrides: list[str]) -> None:

    print_text(write_project(Path(args.folder).expanduser()))


def _resume(args: argparse.Namespace, overrides: list[str]) -> int:
    from siirl.commands.resume import resume
    from siirl.runs.run_state import run_folder

    return resume(run_folder(args.run).absolute(), overrides, args.trust)


def _amend(args: argparse.Namespace, overrides: list[str]) -> int:
    from siirl.commands.amend import amend
    from siirl.runs.run_state import run_folder

    return amend(run_folder(args.run).absolute(), overrides, args.trust)


def _eval(args: argparse.Namespace, overrides: list[str]) -> int:
    from siirl.commands.evaluate import evaluate, table_text

    code, told = evaluate(
        args.model, overrides, args.config_name, args.samples, args.right, args.out, args.trust
    )
    if told is not None:
        print_text(json.dumps(told, indent=1) if args.json else table_text(told))
    return code


def _chat(args: argparse.Namespace, _overrides: list[str]) -> int:
    from siirl.commands.chat_command import Sampling, chat

    sampling = Sampling(args.temperature, args.max_tokens, args.seed)
    return chat(args.model, args.agent, args.system, sampling)
