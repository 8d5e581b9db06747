"""The checks of what a machine must hold for a run, before any worker starts there. No torch.

`python -m siirl.launch.preflight` checks the machine where it runs for the job that it reads from its input.
"""

import datetime
import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from siirl.agents.tool_files import check_tool_file
from siirl.checkpoint.files import (
    EXTRA_FILE,
    POINTER,
    check_given,
    check_writable,
    newest_complete,
    pointer_problem,
    replaced,
)
from siirl.command_line import user_errors
from siirl.compiler.choices import Kept
from siirl.compiler.plan import Plan
from siirl.compiler.resume_settings import differing, settings_of
from siirl.config import Config, from_dict, with_overrides
from siirl.errors import ConfigError, Place, UserError
from siirl.findings import Findings
from siirl.launch.job import Job
from siirl.launch.run_folder import refuse_used, with_own_results
from siirl.launch.run_record import is_recorded
from siirl.model_files.local_models import with_local_models
from siirl.model_files.run_inputs import inputs_of
from siirl.rewards.by_data_source import RewardChooser
from siirl.rewards.judge import check_judge
from siirl.rewards.user_function import check_user_function
from siirl.user_code.signatures import Call
from siirl.user_code.source import check_reference

log = logging.getLogger(__name__)


def preflight(cfg: Config, plan: Plan) -> None:
    """UserError for data, models, user code and directories that the run would trip over later, all at once.

    Runs nothing of the user's and needs no torch; reads metadata, and the data sources of the prompts.
    Models that are named as on a hub are downloaded, if nothing else is wrong.
    """
    found = Findings()
    check_code(plan, {name: with_overrides(cfg, node.overrides) for name, node in plan.nodes.items()}, found)
    check_folders(cfg, plan, found)
    with found.at(Place.MODELS):
        plan = plan if len(found) else with_local_models(cfg, plan)
    from siirl.launch.input_checks import check_inputs

    node_cfgs = {name: with_overrides(cfg, node.overrides) for name, node in plan.nodes.items()}
    held = check_inputs(cfg, plan, node_cfgs, found)
    found.close()
    for line in held:
        log.info("data: %s", line)


def check_folders(cfg: Config, plan: Plan, found: Findings) -> None:
    """Folders that the run writes to, and the checkpoint that it is told to resume from."""
    trainer = cfg.trainer
    with found.at(Place.MACHINE):
        check_writable(Path(trainer.output_dir).expanduser(), "trainer.output_dir")
    with found.at(Place.MACHINE):
        if trainer.dump_rollouts_dir:
            check_writable(Path(trainer.dump_rollouts_dir).expanduser(), "trainer.dump_rollouts_dir")
    with found.at(Place.MACHINE):
        if trainer.save_freq > 0:
            check_writable(Path(trainer.default_local_dir).expanduser())
    check_resumed(cfg, plan, found)


def check_code(plan: Plan, node_cfgs: Mapping[str, Config], found: Findings) -> None:
    """What is wrong with code of the user's, by its source text: it cannot be called as it will be.

    node_cfgs: the configuration of each node. The same on every machine that has the code.
    """
    check_tools(plan, node_cfgs, found)
    for name, node in plan.nodes.items():
        cfg = node_cfgs[name]
        loss = cfg.actor_rollout_ref.actor.loss_name
        with found.at(Place.WORKFLOW):
            if node.spec.trains_policy and ":" in loss:
                check_reference(loss, f"node {name!r}: policy_loss.loss_mode")
        for function in cfg.algorithm.credit.group_by if node.spec.credits else ():
            with found.at(Place.WORKFLOW):
                if ":" in function:
                    check_reference(function, f"node {name!r}: algorithm.credit.group_by", Call(("keys",)))
        with found.at(Place.WORKFLOW):
            if node.executable is not None:
                call = Call(("context", "rows"), node.needs)
                check_reference(node.executable, f"node {name!r}: executable_ref", call)
        for check in (CODE_CHECKS[need] for need in node.needs if need in CODE_CHECKS):
            check(cfg, found)


def check_reward_code(cfg: Config, found: Findings) -> None:
    """The user's own reward function, and the choice of functions by data source."""
    with found.at(Place.REWARDS):
        check_user_function(cfg)
    with found.at(Place.REWARDS):
        RewardChooser(cfg)


def check_judge_settings(cfg: Config, found: Findings) -> None:
    """The judge's question, and how its answer is read."""
    with found.at(Place.REWARDS):
        check_judge(cfg)


CODE_CHECKS = {"scorer": check_reward_code, "judge": check_judge_settings}
"""What an op needs -> the check of the user's code and settings that it is built from."""


def check_resumed(cfg: Config, plan: Plan | None, found: Findings) -> None:
    """The checkpoint that the run is told to resume from is there and was made with the same settings; the
    folder of checkpoints can be used, and holds no other run's results."""
    trainer, resumed = cfg.trainer, None
    with found.at(Place.MACHINE):
        if trainer.resume_mode == "resume_path":
            resumed = check_given(trainer.resume_from_path, contents=False)
    with found.at(Place.MACHINE):
        root = Path(trainer.default_local_dir).expanduser()
        goes_on = _goes_on(cfg)
        saves = trainer.save_freq > 0 and (root / POINTER).is_dir()
        if (goes_on or saves) and (why := pointer_problem(root)):
            raise ConfigError(why)
        if goes_on and not replaced(root):
            resumed = newest_complete(root, contents=False)
    with found.at(Place.MACHINE):
        refuse_used(cfg)
    with found.at(Place.CONFIGURATION):
        if resumed is not None and plan is not None and not trainer.rollout_only:
            check_settings(cfg, plan, resumed)


def _goes_on(cfg: Config) -> bool:
    """Whether the run takes up the newest checkpoint of its folder, if there is one."""
    return cfg.trainer.resume_mode == "auto" and not cfg.trainer.rollout_only


def kept_choices(cfg: Config) -> Kept | None:
    """What was chosen at the start of the run that this one goes on with; None if it goes on with none."""
    saved = _resumed_extra(cfg).get("chosen")
    return Kept.from_dict(saved) if saved else None


def with_template_date(cfg: Config) -> Config:
    """The configuration with the date that chat templates write: as set, else of the run's first start.

    So a run that goes on another day reads the prompts that it has read before.
    """
    if cfg.data.template_date is not None:
        return cfg
    date = _resumed_extra(cfg).get("template_date") or datetime.date.today().isoformat()
    return replace(cfg, data=replace(cfg.data, template_date=date))


def _resumed_extra(cfg: Config) -> dict[str, Any]:
    """What the checkpoint that the run goes on with says of that run; {} where it goes on with none.

    A checkpoint that cannot be read is left to check_resumed.
    """
    trainer, root = cfg.trainer, Path(cfg.trainer.default_local_dir).expanduser()
    try:
        if trainer.resume_mode == "resume_path":
            resumed = check_given(trainer.resume_from_path, contents=False)
        else:
            resumed = newest_complete(root, contents=False) if _goes_on(cfg) and not replaced(root) else None
        extra = json.loads((resumed / EXTRA_FILE).read_text()) if resumed else {}
    except (OSError, ValueError, AttributeError, UserError):
        return {}
    return extra if isinstance(extra, dict) else {}


def check_settings(cfg: Config, plan: Plan, checkpoint: Path) -> None:
    """ConfigError if a run goes on with settings that make another run of it, unless it is told to.

    Nothing is known of a checkpoint without settings, or without a file that can be read.
    """
    try:
        saved = json.loads((checkpoint / EXTRA_FILE).read_text()).get("settings")
    except (OSError, ValueError, AttributeError):
        return
    now = settings_of(cfg, plan) | inputs_of(cfg, plan).digests
    changes = differing(saved, now) if isinstance(saved, dict) else []
    if not changes:
        return
    listed = "".join(f"\n  {line}" for line in changes)
    if cfg.trainer.resume_changed:
        log.warning("the run goes on from %s with other settings:%s", checkpoint, listed)
        return
    raise ConfigError(
        f"the checkpoint {checkpoint} was made with other settings: what comes after it would be another "
        f"run.{listed}\nSet them as they were; or set trainer.resume_changed=true to go on with those of "
        "now; or start another run (trainer.output_dir)."
    )


def check_tools(plan: Plan, node_cfgs: Mapping[str, Config], found: Findings) -> None:
    """Files of tools that cannot be used."""
    for stage in (stage for interaction in plan.interactions.values() for stage in interaction.speaking):
        multi_turn = node_cfgs[stage.node].actor_rollout_ref.rollout.multi_turn
        with found.at(Place.WORKFLOW):
            if multi_turn.enable:
                check_tool_file(multi_turn, f"node {stage.node!r}")


def main() -> int:
    """Exit code: 0, or 2 with the user's mistake as a message."""
    job = Job.from_json(sys.stdin.read())
    logging.disable(logging.WARNING)  # what comes out is the message
    with user_errors() as outcome:
        cfg = from_dict(job.config)
        own = is_recorded(job.output_path, job.run_id)  # of an earlier attempt
        if own and job.amendments:  # which have been compared with what the checkpoint holds
            cfg = replace(cfg, trainer=replace(cfg.trainer, resume_changed=True))
        preflight(with_own_results(cfg) if own else cfg, Plan.from_json(job.plan))
    return outcome.code


if __name__ == "__main__":
    sys.exit(main())
