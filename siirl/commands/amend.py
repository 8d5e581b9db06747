"""`siirl amend RUN key=value ...`: other settings of a run that goes on, from its next step on. No torch.

The changed run is checked as at a start, its plan compared with the one that runs (compiler/amendable.py).
Then it is asked for in the run's folder, and this process waits until it is so, or has been taken back.
"""

import dataclasses
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from siirl.command_line import print_text
from siirl.commands.recorded_run import RecordedRun, from_here
from siirl.commands.resume import permissions
from siirl.compiler.amendable import changed_keys, differences, problems, why_not
from siirl.compiler.choices import Kept
from siirl.compiler.memory.phases import estimate_record
from siirl.compiler.plan import Plan
from siirl.config import Config, from_dict, to_dict
from siirl.config.load import read_config
from siirl.config.roles import trained_group
from siirl.config.tree import print_config
from siirl.errors import ConfigError, NotSupportedError, Place
from siirl.findings import Findings
from siirl.launch.devices import machine_of, rank_memory_gib
from siirl.launch.input_checks import check_inputs
from siirl.launch.job import Job
from siirl.launch.run_folder import is_held
from siirl.launch.run_record import without_secrets
from siirl.launch.survey import Survey, survey, survey_inputs, with_choices
from siirl.model_files.run_inputs import RunInputs, inputs_of
from siirl.observe.amendments import Amended, Amendment, ask, is_asked, no_longer_ask, recorded
from siirl.observe.position import read_position
from siirl.show.memory_text import memory_warnings

LOOK_S = 0.2
NOT_AMENDABLE = {
    "torchrun": (
        "that torchrun started: it starts workers again by its own command, which has the settings of the "
        "start, so an amendment would be lost with a worker. Stop it, and run its command again with "
        "key=value trainer.resume_mode=auto trainer.resume_changed=true."
    ),
    "ray": (
        "whose first worker is on a machine of the Ray cluster that does not see this folder, or whose "
        "checkpoints this machine does not see: have trainer.output_dir on a disk that the machines share, "
        "with the checkpoints in it. Stop it, and siirl resume RUN key=value trainer.resume_changed=true."
    ),
}
"""Launcher -> why a run of it takes no amendments, and what to do."""
WHOLE = {"model", "optimizer", "extra"}
"""Parts of a checkpoint from which a run goes on as it was."""


def amend(folder: Path, overrides: list[str], trust: bool) -> int:
    """Amend the run of a folder, and wait for it; 1 if it was taken back, or the run ended before.

    UserError: all that is wrong with the new settings, and why they cannot be had while the run goes on.
    """
    recorded_run, job = RecordedRun.read(folder), running_job(folder)
    permitted = permissions(recorded_run, "siirl amend", overrides, trust)
    found = Findings()
    given = from_here(overrides)
    recorded_run.enter_directory()
    own = [f"trainer.output_dir={job.output_path}", "trainer.resume_mode=auto", "trainer.overwrite=false"]
    cfg = read_config([*own, *permitted, *given], recorded_run.config_file, found)
    changed = amended(job, cfg, found)
    print_text("\n".join(changed.lines))
    settings = without_secrets(overrides)
    amendment = Amendment(
        uuid.uuid4().hex, job.run_id, settings, changed.lines, changed.job_fields(), print_config(changed.cfg)
    )
    if is_asked(folder):
        raise ConfigError(f"another amendment of {folder} waits for the end of the step. Wait for it.")
    ask(folder, amendment)
    return _awaited(folder, job, amendment.id)


def running_job(folder: Path) -> Job:
    """The job of a run that goes on and takes amendments. ConfigError, NotSupportedError: there is none."""
    try:
        job = Job.read(folder / "job.json")
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{folder} has no job.json that can be read: {error}.") from None
    job = dataclasses.replace(job, output_dir=str(folder.absolute()))
    by_hand = f"siirl resume {folder} key=value trainer.resume_changed=true"
    if not is_held(folder):
        raise ConfigError(
            f"no run goes on in {folder} on this machine: there is nothing to amend. Continue it with other "
            f"settings: {by_hand}."
        )
    trainer = from_dict(job.config).trainer
    if trainer.val_only or trainer.rollout_only:
        raise NotSupportedError("not supported yet: amending a run that trains nothing: start it again.")
    if not job.amendable:
        raise NotSupportedError(f"not supported yet: amending a run {NOT_AMENDABLE[job.launcher]}")
    return job


@dataclass(frozen=True)
class Changed:
    """The run as it is to be."""

    before: Job
    cfg: Config
    plan: Plan
    node_cfgs: Mapping[str, Config]
    lines: list[str]
    """What differs, and what is to be said of it."""

    def job_fields(self) -> dict[str, Any]:
        """What the launcher's Job has otherwise."""
        return {
            "config": to_dict(self.cfg),
            "plan": self.plan.to_json(),
            "memory_estimate": estimate_record(self.plan, self.node_cfgs, rank_memory_gib(self.cfg)),
            "inputs": dataclasses.asdict(_inputs(RunInputs(**self.before.inputs), self.cfg, self.plan)),
        }


def amended(job: Job, cfg: Config, found: Findings) -> Changed:
    """The run of a job by another configuration. UserError: all that is wrong with it, or that cannot be."""
    before, plan = from_dict(job.config), Plan.from_json(job.plan)
    here = job.launcher == "local"
    if cfg.trainer.min_nnodes is not None and cfg.trainer.nnodes != before.trainer.nnodes:
        raise NotSupportedError(
            f"not supported yet: amending a run that does with {before.trainer.nnodes} of "
            f"{cfg.trainer.nnodes} machines (trainer.nnodes). Amend it when all are there."
        )
    seen = survey_inputs(survey(cfg, found), True, found)
    if not len(found) and seen.plan is not None and here:
        check_inputs(seen.cfg, seen.plan, seen.node_cfgs, found)
    found.close()
    seen = with_choices(seen, machine_of(cfg, job.launcher, here), Kept.of(plan))
    assert seen.plan is not None, "without a plan there is a problem"
    too_much = memory_warnings(seen.plan, seen.node_cfgs, rank_memory_gib(seen.cfg), found)
    keys = changed_keys(before, seen.cfg)
    for why in [
        *(f"{name}: {why}" for name in keys if (why := why_not(name))),
        *problems(plan, seen.plan),
        *_incomplete_checkpoints(seen),
    ]:
        found.add(
            ConfigError(
                f"{why}: this cannot be amended while the run goes on. Stop it, and siirl resume "
                f"{job.output_path} key=value trainer.resume_changed=true; or start another run."
            ),
            Place.CONFIGURATION,
        )
    found.close()
    lines = differences(plan, seen.plan, keys)
    if not lines:
        raise ConfigError("these settings change nothing of the run: it has them already.")
    warnings = [f"warning: {line}" for line in (*seen.warnings, *too_much)]
    return Changed(job, seen.cfg, seen.plan, seen.node_cfgs, [*lines, *warnings])


def _incomplete_checkpoints(seen: Survey) -> list[str]:
    """Models whose checkpoints lack what the next step needs."""
    found = []
    for model in seen.plan.models.values() if seen.plan is not None else ():
        if model.trains:
            checkpoint = trained_group(seen.node_cfgs[model.node], model.role).checkpoint
            for key in ("save_contents", "load_contents"):
                if missing := WHOLE - set(getattr(checkpoint, key)):
                    found.append(f"checkpoint.{key} of {model.name} leaves out {', '.join(sorted(missing))}")
    return found


def _inputs(before: RunInputs, cfg: Config, plan: Plan) -> RunInputs:
    """What the amended run reads: what it has read before as it was when the run began, the rest as it is."""
    now = inputs_of(cfg, plan)
    same = {name for name, path in now.files.items() if before.files.get(name) == path}
    digests = now.digests | {name: before.digests[name] for name in same}
    return RunInputs(digests, now.files, now.texts | before.texts)


def _awaited(folder: Path, job: Job, name: str) -> int:
    """Wait until the run has made its first step by it; tell how it went."""
    said = False
    try:
        while True:
            goes_on = is_held(folder)
            mine = [one for one in recorded(folder) if one.id == name]
            if mine and not said:
                said = True
                print_text(f"amended after step {mine[0].step}: the workers begin again, from its checkpoint")
            if mine and mine[-1].state == "withdrawn":
                print_text(f"taken back, the run goes on as it was: {mine[-1].cause}")
                return 1
            if mine and (not goes_on or _has_gone_on(job, mine[0])):
                print_text(f"step {mine[0].step + 1} is done")
                return 0
            if not goes_on:
                no_longer_ask(folder)
                print_text("the run ended before: it was not amended")
                return 1
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        if no_longer_ask(folder):
            print_text("not asked any more: the run goes on as it is")
        raise


def _has_gone_on(job: Job, amended_: Amended) -> bool:
    """Whether the first step by it is done."""
    at = read_position(job.position_path(0))
    return at is not None and at.step > amended_.step + 1
