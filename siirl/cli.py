"""The console script: siirl check | test | plan | run | serve | migrate | export | convert | trace
 | new | resume | amend | eval | chat | ls | compare | watch | audit | view | doctor.

A user error is one message and exit code 2. check and plan need neither torch nor devices; export and
convert import what they need when they are called.
"""

import argparse
import io
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib import metadata
from pathlib import Path

from siirl import main_dag
from siirl.command_line import add_config_arguments, import_from_here, parse_settings, print_text, user_errors
from siirl.commands.command_arguments import add_commands
from siirl.compiler.choices import choice_lines
from siirl.compiler.plan_warnings import plan_notes
from siirl.compiler.service_needs import service_lines
from siirl.completion import complete
from siirl.config.load import read_config
from siirl.config.meant import COMMANDS
from siirl.errors import CheckpointError, ConfigError, DataError, UserError
from siirl.findings import Findings
from siirl.launch.devices import device_name
from siirl.launch.job import choose_launcher
from siirl.migrate.defaults import ORIGINS
from siirl.migrate.foreign_files import page, read_source, translate_source
from siirl.observe.trace import merge_trace
from siirl.runs.run_commands import add_run_commands
from siirl.session import PlannedRun, planned
from siirl.spelling import suggest
from siirl.testing import command as test_command
from siirl.view import view_command

VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*=")
"""A variable of a script on the command line of `siirl migrate`: settings have small letters and dots."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    complete(_parser)
    with user_errors() as outcome:
        _check_command(argv)
        if argv[:1] and argv[0] in ("check", "test", "plan", "run", "serve", "migrate"):
            import_from_here()
        if argv[:1] == ["run"]:
            return main_dag.main(argv[1:], "siirl run")
        if argv[:1] == ["serve"]:
            return main_dag.main(["--config-name", "serve", *argv[1:]], "siirl serve")
        args, overrides = parse_settings(_parser(), argv)
        outcome.code = args.command(args, overrides) or 0
    return outcome.code


def _check_command(argv: Sequence[str]) -> None:
    """ConfigError for a first word that is no command. Options are argparse's."""
    word, known = argv[0] if argv else "-h", _commands(_parser())
    if word.startswith("-") or word in known:
        return
    if "=" in word:
        raise ConfigError(f"{word}: settings come after a command. Write siirl run {word} ..., or check.")
    meant = f"Did you mean {COMMANDS[word]!r}?" if word in COMMANDS else suggest(word, known)
    raise ConfigError(f"there is no command {word!r}. {meant}")


def _commands(parser: argparse.ArgumentParser) -> list[str]:
    return [name for action in parser._actions if isinstance(action.choices, dict) for name in action.choices]


def _planned(
    args: argparse.Namespace, overrides: list[str], elsewhere: bool = True, devices_here: bool | None = None
) -> PlannedRun:
    """The run that a command line plans. Warnings go to stderr."""
    found, asks_hub = Findings(), not getattr(args, "elsewhere", False)
    run = planned(read_config(overrides, args.config_name, found), elsewhere, found, devices_here, asks_hub)
    for line in run.warnings:
        print(f"warning: {line}", file=sys.stderr)
    return run


def _check(args: argparse.Namespace, overrides: list[str]) -> None:
    run = _planned(args, overrides, args.elsewhere)
    plan = run.plan
    print(f"ok: DAG {plan.dag_id!r}, {len(plan.nodes)} nodes on {plan.world_size} ranks")
    for line in run.data:
        print(f"data: {line}")
    for node, why in (
        plan.pruned.items() if run.cfg.dag.workflow_path or run.cfg.dag.custom_pipeline_fn else ()
    ):
        print(f"skipped: {node}: {why}")
    for line in service_lines(run.cfg):
        print(f"service: {line}")
    for note in plan_notes(plan):
        print(f"note: {note}.")
    if not args.elsewhere:
        _print_dialects(run, args.dialect)
    for line in choice_lines(plan):
        print(f"chosen: {line}")
    if args.security:
        from siirl.launch.security import Subject, security_report

        print_text(security_report(Subject(run.cfg, plan, run.node_cfgs, choose_launcher(run.cfg))))


def _print_dialects(run: PlannedRun, example: bool) -> None:
    """How the policies speak whose tokenizers are here; the same of several agents once."""
    from siirl.show.dialect_text import dialect_lines, dialects_here, example_text

    told: set[str] = set()
    for policy, dialect, template in dialects_here(run.plan, run.node_cfgs):
        if dialect.name in told:
            continue
        told.add(dialect.name)
        print_text("\n".join(dialect_lines(policy, dialect)))
        if example and template is not None:
            print_text(example_text(dialect, template, sys.stdout.isatty()))


def _plan(args: argparse.Namespace, overrides: list[str]) -> None:
    if args.run:
        _plan_from(args, overrides)
        return
    for name in ("device", "tokens"):
        if getattr(args, name) and not (args.explain or args.search):
            raise ConfigError(
                f"--{name} {getattr(args, name)}: only --explain and --search predict times. Add one of them."
            )
    if args.search:
        from siirl.commands.plan_search import search

        print_text(search(overrides, args.config_name, args.device, args.tokens))
        return
    run = _planned(args, overrides, devices_here=not args.explain or bool(not args.device and device_name()))
    print_text(run.explain(args.device, args.tokens) if args.explain else str(run).rstrip("\n"))
    if args.json:
        _write(Path(args.json), lambda path: path.write_text(run.plan.to_json(), encoding="utf-8"))
    if args.draw:
        _write(Path(args.draw), run.draw)


def _plan_from(args: argparse.Namespace, overrides: list[str]) -> None:
    from siirl.commands.plan_from import what_if
    from siirl.runs.run_state import run_folder

    for name in ("search", "explain", "tokens", "json", "draw"):
        if getattr(args, name):
            raise ConfigError(
                f"--from {args.run} and --{name}: with --from the plan, its times and lengths are the run's, "
                "and both are told side by side. Leave out one of them."
            )
    print_text(what_if(run_folder(args.run), overrides, args.device, args.trust))


def _migrate(args: argparse.Namespace, overrides: list[str]) -> int:
    """Prints the command; 1 if something of the script is not supported, or the command is not accepted."""
    variables = [item.partition("=") for item in overrides if VARIABLE.match(item)]
    settings = [item for item in overrides if not VARIABLE.match(item)]
    path = Path(args.file)
    source = read_source(path, {name: value for name, _, value in variables}, settings)
    translation = translate_source(source)
    command = [*translation.options, *(f"{item.name}={item.value}" for item in translation.written())]
    said, outcome = io.StringIO(), ["`siirl check --elsewhere` accepts the command."]
    accepted = True
    try:
        checked, rest = parse_settings(_parser(), ["check", "--elsewhere", *command])
        with redirect_stdout(said), redirect_stderr(said):
            _check(checked, rest)
    except UserError as error:
        accepted, outcome = (
            False,
            ["`siirl check --elsewhere` refuses the command:", *str(error).splitlines()],
        )
    said_lines = [line for line in said.getvalue().splitlines() if not line.startswith("chosen: ")]
    title = f"siirl's command for {path.name} ({ORIGINS[source.origin][0]})"
    print_text(page(title, translation, source.open, [*outcome, *said_lines]))
    return 0 if accepted and not translation.of("impossible") else 1


def _export(args: argparse.Namespace, overrides: list[str]) -> None:
    from siirl.checkpoint.export import export_adapter, export_hf

    checkpoint, out = Path(args.checkpoint), Path(args.out)
    with _damage_is_the_users():
        if args.adapter:
            export_adapter(checkpoint, out, args.model, args.base)
        else:
            export_hf(checkpoint, out, args.model, args.base, args.quantised_as)
    print(f"wrote {out.absolute()}")


def _convert(args: argparse.Namespace, overrides: list[str]) -> None:
    from siirl.checkpoint.convert import convert
    from siirl.checkpoint.text_part import write_text_part, write_whole

    source, out = Path(args.source), Path(args.out)
    with _damage_is_the_users():
        if args.into:
            written = write_whole(source, args.into, out)
        else:
            written = write_text_part(source, out) if args.text else convert(source, out, args.model)
    print(f"wrote {Path(args.out).absolute()}, {written}")


@contextmanager
def _damage_is_the_users() -> Iterator[None]:
    """A checkpoint that a command is given and that cannot be read is reported as its message alone."""
    try:
        yield
    except CheckpointError as error:
        raise DataError(str(error)) from error


def _trace(args: argparse.Namespace, overrides: list[str]) -> None:
    print(
        f"wrote {merge_trace(Path(args.output_dir).absolute())}: open it in ui.perfetto.dev or chrome://tracing"
    )


def _write(path: Path, write: Callable[[Path], object]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}. Choose another file.") from None
    print(f"wrote {path.absolute()}")


def _version() -> str:
    """Of the package; of a folder on the path that nobody has installed there is none."""
    try:
        return metadata.version("siirl")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _add_check(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--elsewhere",
        action="store_true",
        help="data and models are on other machines: do not look for them here or on a hub",
    )
    sub.add_argument(
        "--dialect",
        action="store_true",
        help="also show an example conversation as the model's chat template writes it",
    )
    sub.add_argument(
        "--security",
        action="store_true",
        help="also list open ports, code that runs without isolation, and files that others can read",
    )


def _add_plan(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--json", metavar="FILE", help="write the plan as JSON")
    sub.add_argument("--draw", metavar="FILE", help="draw the plan: .svg or .png")
    sub.add_argument("--explain", action="store_true", help="predict how long each phase of a step takes")
    sub.add_argument("--search", action="store_true", help="find the fastest layouts that fit")
    sub.add_argument(
        "--from",
        dest="run",
        metavar="RUN",
        help="predict the step time of a recorded run under these keys, from its measured steps",
    )
    sub.add_argument(
        "--trust", action="store_true", help="with --from: even if other users can change its folder"
    )
    sub.add_argument("--device", metavar="KIND", help="GPU to predict for, e.g. h200 [that of this machine]")
    sub.add_argument(
        "--tokens",
        metavar="PROMPT+RESPONSE|RUN",
        help="mean lengths to predict with, e.g. 256+600, or a run's folder [the longest allowed]",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="siirl",
        description="Post-train language models by reinforcement learning; the workflow is a DAG.",
        epilog="Settings are key=value, as in data.train_batch_size=64; docs/configuration/ lists them.",
    )
    parser.add_argument("--version", action="version", version=f"siirl {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command, add_options, help_text in (
        ("check", _check, _add_check, "list all that is wrong with a command, before anything starts"),
        ("plan", _plan, _add_plan, "print what runs where and whether it fits, without starting anything"),
    ):
        sub = commands.add_parser(name, help=help_text)
        add_config_arguments(sub)
        sub.set_defaults(command=command)
        add_options(sub)
    run = commands.add_parser("run", help="train: the same as python -m siirl.main_dag", add_help=False)
    add_config_arguments(run)
    serve = commands.add_parser(
        "serve", help="serve Tinker's API: clients train adapters here by loops of their own", add_help=False
    )
    add_config_arguments(serve)
    migrate = commands.add_parser(
        "migrate", help="turn a launch script or YAML file of siiRL or verl into a command of siirl"
    )
    migrate.add_argument("file", help="a script (it is read, not run), or a YAML file of keys or nodes")
    migrate.add_argument(
        "overrides", nargs="*", metavar="NAME=value", help="variables of the script, and further settings"
    )
    migrate.set_defaults(command=_migrate)
    export = commands.add_parser("export", help="turn a checkpoint into a Hugging Face model")
    export.add_argument(
        "checkpoint", help="a checkpoint (.../global_step_N), or a run's folder: its last one"
    )
    export.add_argument("out", help="folder to write the model to")
    export.add_argument(
        "--model", help="which model of the checkpoint, e.g. agent_0.actor; needed if it has several"
    )
    export.add_argument("--base", type=Path, help="base model of a LoRA adapter, if it has moved since")
    export.add_argument(
        "--adapter", action="store_true", help="write only the LoRA adapter, in the format of peft"
    )
    export.add_argument(
        "--quantised-as",
        type=Path,
        metavar="DIRECTORY",
        help="a released model in FP8, of which the same tensors are quantised again, in the same blocks",
    )
    export.set_defaults(command=_export)
    convert = commands.add_parser(
        "convert", help="turn a Hugging Face model into a distributed checkpoint, or back"
    )
    convert.add_argument(
        "source", help="a model's folder, a distributed checkpoint, or a checkpoint of a run"
    )
    convert.add_argument("out", help="folder to write, which must not exist")
    convert.add_argument("--model", help="which model of a run's checkpoint, e.g. agent_0.actor")
    parts = convert.add_mutually_exclusive_group()
    parts.add_argument(
        "--text", action="store_true", help="write only the language model of a vision-language model"
    )
    parts.add_argument(
        "--into", type=Path, help="vision-language model to put the trained language model (source) back into"
    )
    convert.set_defaults(command=_convert)
    trace = commands.add_parser(
        "trace", help="join the traces of a run's ranks into one file, also after a crash"
    )
    trace.add_argument("output_dir", help="trainer.output_dir of a run with trainer.trace=true")
    trace.set_defaults(command=_trace)
    test_command.add_command(commands)
    add_commands(commands)
    add_run_commands(commands)
    view_command.add_command(commands)
    for listed in commands._choices_actions:
        commands.choices[listed.dest].description = listed.help
    return parser


if __name__ == "__main__":
    sys.exit(main())
