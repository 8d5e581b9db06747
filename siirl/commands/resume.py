"""`siirl resume`: the main job again, by the keys that a run has recorded, from its last checkpoint; and
whether a run's folder may be started again: it names code, commands and files, and so is a program.
"""

import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from siirl import main_dag
from siirl.commands.recorded_run import RecordedRun, from_here
from siirl.config import Config
from siirl.config.load import read_config
from siirl.config.resolve import get
from siirl.config.root import all_keys
from siirl.errors import ConfigError
from siirl.findings import Findings, is_broken
from siirl.guarded_files import user_name, who_may_change
from siirl.launch.run_record import CONFIG_FILE, RUN_FILE
from siirl.launch.security import REFERENCE
from siirl.observe.printable import printable
from siirl.runs.run_files import RESUMED
from siirl.runs.run_state import read_run

RUNS = (
    *("custom_reward_function.path", ".external_lib", ".tool_config_path", ".process_path", ".env_path"),
    *(".serve.command", "dag.workflow_path", ".trust_remote_code", ".engine_kwargs.vllm"),
    *(".engine_kwargs.sglang", "ray_init.env_vars", "token_env", ".url"),
)
"""Ends of keys that say what runs, in what environment, and where secrets go."""
VERIFIERS = "verifiers:"
ASKED_AGAIN = ("trainer.resume_changed",)
"""Permissions that each command gives anew."""
OF_OTHERS = ("trainer.behind_firewall", ".trust_remote_code")
"""Ends of those that a folder which others can change gives nobody."""
CODE_FILES, MOST_FILES, DEEPEST = (".py", ".yaml", ".yml", ".json"), 10_000, 3


def permissions(recorded: RecordedRun, command: str, overrides: list[str], trust: bool) -> list[str]:
    """The settings that take back what the folder permits; what is typed, `overrides`, comes behind them.

    ConfigError if others can change the folder, or what it names, and `trust` does not say that this is well.
    """
    cfg = read_config(overrides, recorded.config_file, Findings())  # what is wrong is told when it is started

    def taken_back(*ends: str) -> list[str]:
        return [f"{name}=false" for name in all_keys() if name.endswith(ends) and get(cfg, name) is True]

    changeable = list(_changeable(recorded, cfg))
    if not changeable:
        return taken_back(*ASKED_AGAIN)
    listed = "\n".join(f"  {path}: {why}" for path, why in changeable[:8])
    more = f"\n  and {len(changeable) - 8} more" if len(changeable) > 8 else ""
    runs = "\n".join(f"  {name}={value}" for name, value in _what_runs(cfg)) or "  nothing but siirl"
    told = (
        f"a run's folder is a program, and others can change this one:\n{listed}{more}\n"
        f"As {user_name(os.geteuid())}, {command} would use, from {recorded.directory or 'here'}:\n{runs}"
    )
    if not trust:
        raise ConfigError(f"{told}\nIf you have read these and trust whoever wrote them, add --trust.")
    print(printable(told), file=sys.stderr, flush=True)
    return taken_back(*ASKED_AGAIN, *OF_OTHERS)


def _what_runs(cfg: Config) -> Iterator[tuple[str, Any]]:
    """The settings that name code, commands, environments and services, with their values."""
    for name in all_keys():
        value = get(cfg, name)
        if is_broken(value):
            continue
        texts = [text for text in (value if isinstance(value, tuple) else (value,)) if isinstance(text, str)]
        named = name.endswith(RUNS) and value not in (None, False, "", {}, ())
        if named or any(REFERENCE.fullmatch(text) or text.startswith(VERIFIERS) for text in texts):
            yield name, value


def _changeable(recorded: RecordedRun, cfg: Config) -> Iterator[tuple[Path, str]]:
    """(file or folder that says what runs, who else can change it)."""
    base = Path(recorded.directory or os.getcwd())
    values = [value if isinstance(value, tuple) else (value,) for _, value in _what_runs(cfg)]
    files = [base / Path(str(text).partition(":")[0]).expanduser() for text in itertools.chain(*values)]
    folder = recorded.folder
    looked = [folder, folder / CONFIG_FILE, folder / RUN_FILE, recorded.checkpoints, base]
    looked += [path for file in files if file.is_file() for path in (file, file.parent)]
    for path in dict.fromkeys(itertools.chain(looked, _code_below(folder))):
        if path.exists() and (why := who_may_change(path)):
            yield path, why


def _code_below(folder: Path) -> Iterator[Path]:
    """Folders of a run, and files in them that may say what runs; not those of checkpoints."""
    found = 0
    for place, folders, files in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        folders[:] = [name for name in folders if depth < DEEPEST and not name.startswith("global_step_")]
        for name in (*folders, *(name for name in files if name.endswith(CODE_FILES))):
            yield Path(place, name)
            found += 1
            if found == MOST_FILES:
                return


LENGTHS = ("trainer.total_training_steps", "trainer.total_epochs")


def resume(folder: Path, overrides: list[str], trust: bool) -> int:
    """Go on with the run of a folder; the exit code is that of the job.

    trust: others may be able to change the folder. ConfigError: they are, it is at its end and no key makes
    it longer, or it has no checkpoint.
    """
    recorded, state = RecordedRun.read(folder), read_run(folder)
    permitted = permissions(recorded, "siirl resume", overrides, trust)
    longer = any(item.lstrip("+").startswith(LENGTHS) for item in overrides)
    if state.status == "ended" and not longer:
        raise ConfigError(
            f"{folder} has ended, at step {state.step} of {state.total_steps}: there is nothing left to do. "
            f"Make it longer: siirl resume RUN {LENGTHS[0]}={2 * state.step or 100}."
        )
    if recorded.newest_checkpoint() is None:
        exported = folder / "hf_model"
        further = (
            " Or train its exported weights further, in another run and with a new optimizer: "
            f"actor_rollout_ref.model.path={exported}."
        ) * exported.is_dir()
        raise ConfigError(
            f"{recorded.checkpoints} has no checkpoint to resume from, as trainer.save_freq was not set or "
            "the run ended before its first one. Start over: siirl run --config-name "
            f"{recorded.config_file} trainer.overwrite=true trainer.save_freq=10.{further}"
        )
    own = [
        f"{name}={value}"
        for name, value in zip(RESUMED, (folder, recorded.checkpoints, "auto", "false"), strict=True)
    ]
    given = from_here(overrides)
    recorded.enter_directory()
    return main_dag.main(["--config-name", recorded.config_file, *own, *permitted, *given])
