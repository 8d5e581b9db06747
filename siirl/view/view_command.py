"""`siirl view RUN [RUN ...]`: serve the page of runs, or write it as one file; --demo: of a recorded run."""

import argparse
import io
import socket
import tarfile
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

from siirl.command_line import cleaning_up
from siirl.errors import ConfigError

DEMO = "demo.tar.gz"
"""Made by tools/pack_demo.py; docs/evidence/dashboard.md has the command of the run."""


def add_command(commands: Any) -> None:
    """Add the command to the console script's (what argparse's add_subparsers returned)."""
    text = "open the dashboard of runs: curves, conversations, timeline, errors"
    view = commands.add_parser("view", help=text)
    view.add_argument("runs", nargs="*", metavar="RUN", help="trainer.output_dir of a run, running or ended")
    view.add_argument(
        "--demo", action="store_true", help="show a recorded run of two agents that comes with siirl"
    )
    how = view.add_mutually_exclusive_group()
    how.add_argument("--export", metavar="FILE.html", help="write the page as one file, and serve nothing")
    how.add_argument("--port", type=int, default=0, help="serve on this port of 127.0.0.1 [a free one]")
    view.set_defaults(command=_view)


def _view(args: argparse.Namespace, overrides: list[str]) -> None:
    from siirl.runs.run_state import run_folder
    from siirl.view.view_page import export

    folders = [run_folder(name).resolve() for name in args.runs]
    if not folders and not args.demo:
        raise ConfigError(
            "no run is named: there is nothing to show. Give the trainer.output_dir of a run (`siirl ls` "
            "lists them), or --demo for one that comes with siirl."
        )
    with cleaning_up(), tempfile.TemporaryDirectory(prefix="siirl_demo_") as scratch:
        if args.demo:
            folders.append(unpacked_demo(Path(scratch)))
        if args.export is None:
            _serve(folders, args.port)
            return
        try:
            print(f"wrote {export(folders, Path(args.export).absolute())}")
        except OSError as error:
            raise ConfigError(f"{args.export} cannot be written: {error}. Choose another file.") from error


def unpacked_demo(folder: Path) -> Path:
    """The recorded run, unpacked."""
    with tarfile.open(fileobj=io.BytesIO(files("siirl.view").joinpath(DEMO).read_bytes())) as archive:
        archive.extractall(folder / "demo", filter="data")
    return folder / "demo"


def _serve(folders: list[Path], port: int) -> None:
    from siirl.view.page_server import HOST, PageServer

    with PageServer(folders, port) as server:
        far = f"ssh -L {server.server_port}:{HOST}:{server.server_port} {socket.gethostname()}"
        print(
            f"{server.url}\nopen it in a browser on this machine. On another machine, first type there:\n"
            f"{far}\nCtrl-C ends.",
            flush=True,
        )
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
