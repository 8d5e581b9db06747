"""`siirl view RUN [RUN ...]`: serve the page of runs, or write it as one file."""

import argparse
from pathlib import Path
from typing import Any

from siirl.errors import ConfigError


def add_command(commands: Any) -> None:
    """Add the command to the console script's (what argparse's add_subparsers returned)."""
    text = "show runs as a page: what each does, its curves, conversations, timeline and errors"
    view = commands.add_parser("view", help=text, description=text)
    view.add_argument("runs", nargs="+", metavar="RUN", help="trainer.output_dir of a run, going on or ended")
    how = view.add_mutually_exclusive_group()
    how.add_argument("--export", metavar="FILE.html", help="write the page as one file, and serve nothing")
    how.add_argument("--port", type=int, default=0, help="serve on this port of 127.0.0.1 [a free one]")
    view.set_defaults(command=_view)


def _view(args: argparse.Namespace, overrides: list[str]) -> None:
    from siirl.runs.run_state import run_folder
    from siirl.view.view_page import export

    folders = [run_folder(name).absolute() for name in args.runs]
    if args.export is None:
        _serve(folders, args.port)
        return
    try:
        print(f"wrote {export(folders, Path(args.export).absolute())}")
    except OSError as error:
        raise ConfigError(f"{args.export} cannot be written: {error}. Choose another file.") from error


def _serve(folders: list[Path], port: int) -> None:
    from siirl.view.page_server import PageServer

    with PageServer(folders, port) as server:
        print(f"{server.url}\nopen it in a browser on this machine; Ctrl-C ends.", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
