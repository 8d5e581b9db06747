"""What the folder of a run says of itself. No torch.

run_config.yaml   the resolved configuration; --config-name .../run_config.yaml starts the same run
run.yaml          a document for each start of a run there, the newest last: command, commits, inputs,
                  packages, and what was chosen for keys that nobody set
code/             the code, tools and templates that its workers keep to, each below its whole path
"""

import contextlib
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from siirl.compiler.choices import Kept
from siirl.compiler.plan import Plan
from siirl.config import Config
from siirl.config.tree import print_config, yaml_text
from siirl.config.values import SECRET_KEYS
from siirl.errors import ConfigError
from siirl.guarded_files import write_own
from siirl.launch.devices import device_name
from siirl.launch.run_folder import CODE_DIR, absolute, clear, refuse_used
from siirl.model_files.run_inputs import RunInputs

CONFIG_FILE, RUN_FILE = "run_config.yaml", "run.yaml"
NOTHING = RunInputs()
_GIT_S = 5.0
_NAME_AND_VERSION = re.compile(r"^(Name|Version): *(.*?) *$", re.MULTILINE)


def open_folder(
    cfg: Config,
    run_id: str,
    command: Sequence[str],
    anew: bool = True,
    plan: Plan | None = None,
    inputs: RunInputs = NOTHING,
) -> None:
    """Make the output folder that this start of a run holds its own: nothing stale in it, and its record.

    plan: with what was chosen. anew: False where the run goes on from memory, and what is there is its own.
    ConfigError: it has an earlier run's results, or cannot be written.
    """
    if anew:
        refuse_used(cfg)
        clear(cfg)
    write_record(absolute(cfg.trainer.output_dir), cfg, command, run_id, plan, inputs)


def write_record(
    output: Path,
    cfg: Config,
    command: Sequence[str],
    run_id: str,
    plan: Plan | None = None,
    inputs: RunInputs = NOTHING,
) -> None:
    """Write them into the output folder, readable by this user alone. ConfigError if they cannot be."""
    told = {"run_id": run_id} | describe(command)
    packages = told.pop("packages")
    told |= {"inputs": inputs.digests, "packages": packages}
    if plan is not None:
        told |= {"chosen": Kept.of(plan).to_dict()}
    about = yaml_text(told)
    record = output / RUN_FILE
    try:
        output.mkdir(parents=True, exist_ok=True)
        write_own(output / CONFIG_FILE, print_config(cfg))
        write_own(record, f"{record.read_text() if record.exists() else ''}---\n{about}")
        write_inputs(output, inputs)
    except OSError as error:
        raise ConfigError(
            f"trainer.output_dir={str(output)!r} cannot be written: {error}. Choose a folder that this user "
            "may write to, or free space."
        ) from error


def write_inputs(output: Path, inputs: RunInputs) -> None:
    """Copy the code, tools and templates that workers keep to into the output folder. OSError."""
    for path, text in inputs.texts.items():
        copy = output / CODE_DIR / path.lstrip("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        write_own(copy, text)


def is_recorded(output: Path, run_id: str) -> bool:
    """Whether this start of a run has its record in a folder."""
    record = output / RUN_FILE
    return record.exists() and run_id in record.read_text()


def describe(command: Sequence[str]) -> dict[str, Any]:
    """This start: when, where, by which command, of which source code, with which packages."""
    source = Path(__file__).parents[2]
    return {
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "host": socket.gethostname(),
        "device": device_name() or "",
        "directory": os.getcwd(),
        "command": shlex.join(without_secrets(command)),
        "siirl": {"path": str(source), **commit_of(source)},
        "project": commit_of(Path.cwd()),
        "python": platform.python_version(),
        "packages": packages(),
    }


def packages() -> dict[str, str]:
    """Name -> version of what is installed; of two with a name, the one that is imported.

    Only two lines of the headers are read: a parser of messages takes most of the time of writing a record.
    """
    found: dict[str, str] = {}
    for one in metadata.distributions():
        text = one.read_text("METADATA") or one.read_text("PKG-INFO") or one.read_text("") or ""
        about = dict(_NAME_AND_VERSION.findall(text.partition("\n\n")[0]))
        if "Name" in about:
            found.setdefault(about["Name"], about.get("Version", "None"))
    return dict(sorted(found.items()))


def without_secrets(command: Sequence[str]) -> list[str]:
    """The words of a command; values of secret keys are left out."""
    shown = []
    for word in command:
        key, equals, _ = word.partition("=")
        shown.append(f"{key}=..." if equals and key.lstrip("+").endswith(SECRET_KEYS) else word)
    return shown


def commit_of(folder: Path) -> dict[str, Any]:
    """Git commit of the checkout that a folder lies in, and whether tracked files differ; or nothing."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return {}
    return {"commit": commit, "changed": bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))}


def _git(folder: Path, *words: str) -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            timeout=_GIT_S,
            stdin=subprocess.DEVNULL,
        )
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""


def command_line() -> list[str]:
    """The words by which this process was started, as a user writes them."""
    return [Path(sys.executable).name, *sys.orig_argv[1:]]
