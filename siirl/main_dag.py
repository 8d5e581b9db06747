"""`python -m siirl.main_dag key=value ...`: compose and check the configuration, compile the plan, launch."""

import dataclasses
import logging
import os
import socket
import sys
import time

from siirl.command_line import MODULE, parse_arguments, print_text, readers_may_leave, user_errors
from siirl.compiler.choices import choice_lines
from siirl.compiler.memory.phases import estimate_record
from siirl.compiler.plan import Plan
from siirl.config import Config, to_dict
from siirl.config.load import read_config
from siirl.config.tree import print_config
from siirl.errors import Place, UserError
from siirl.findings import Findings
from siirl.launch.devices import machine_of, rank_memory_gib
from siirl.launch.job import Job, Launcher, choose_launcher
from siirl.launch.launched_devices import assumed_devices, check_start, with_devices_here
from siirl.launch.local import run_local
from siirl.launch.memory_checkpoints import agent_folder, goes_on_from
from siirl.launch.preflight import kept_choices, preflight, with_template_date
from siirl.launch.run_folder import held, with_absolute_folders, with_own_name, with_own_results
from siirl.launch.run_record import command_line, open_folder
from siirl.launch.survey import survey, survey_inputs, with_choices
from siirl.launch.torchrun import is_first_on_machine, is_first_process, run_torchrun
from siirl.model_files.local_models import token_to_environment
from siirl.model_files.run_inputs import RunInputs, inputs_of
from siirl.observe.logs import setup_logging
from siirl.observe.position import record_end
from siirl.show.batch_text import batch_lines
from siirl.show.memory_text import memory_warnings
from siirl.show.plan_text import model_setup

log = logging.getLogger(__name__)


def main(argv: list[str] | None = None, prog: str = MODULE) -> int:
    """Exit code: 0 it ended well, 2 the user's input cannot work, 1 it failed, 130 or 143 it was stopped."""
    with readers_may_leave(), user_errors() as outcome:
        arguments = parse_arguments(argv, prog)
        found = Findings()
        cfg = read_config(arguments.overrides, arguments.config_name, found)
        if arguments.cfg == "job":
            found.close()
            print_text(print_config(cfg))
            return 0
        return run(cfg, found)
    return outcome.code


def run(cfg: Config, found: Findings) -> int:
    """Check everything that can be checked before a worker starts, then run the job to its end.

    found: what is wrong with the command line already; all that is wrong is told at once.
    """
    launcher: Launcher = "local"
    with found.at(Place.MACHINE):
        launcher = choose_launcher(cfg)
    with found.at():
        cfg = with_own_name(cfg, shares_no_time=launcher == "torchrun")
        cfg = with_devices_here(with_absolute_folders(token_to_environment(cfg)), launcher, starts=True)
    with found.at(Place.MACHINE):
        if launcher != "ray":  # whose cluster the run waits for, and fails without
            check_start(cfg, launcher)
    with found.at():
        cfg = with_template_date(cfg)
    seen, device_gib = survey(cfg, found), rank_memory_gib(cfg)
    if len(found):
        survey_inputs(seen, launcher == "ray" or not is_first_on_machine(), found)
        found.close()
    seen = with_choices(seen, machine_of(cfg, launcher, here=launcher != "ray"), kept_choices(cfg))
    cfg, plan, node_cfgs = seen.cfg, seen.plan, seen.node_cfgs
    assert plan is not None, "without a plan there is a problem"
    output_dir = cfg.trainer.output_dir
    run_id = f"{socket.gethostname()} {os.getpid()} {time.time()}"
    job = Job(
        to_dict(cfg),
        plan.to_json(),
        output_dir,
        plan.world_size,
        cfg.trainer.n_gpus_per_node,
        run_id=run_id,
        launcher=launcher,
        inputs=dataclasses.asdict(inputs_of(cfg, plan)),
    )
    if launcher == "torchrun":
        job = dataclasses.replace(job, memory_dir=agent_folder(cfg))
    if not is_first_process():
        return _launch(launcher, job, cfg, plan)
    with held(cfg, run_id):
        setup_logging(0, job.log_dir)
        job = dataclasses.replace(job, memory_estimate=estimate_record(plan, node_cfgs, device_gib))
        too_much = memory_warnings(plan, node_cfgs, device_gib, found)
        found.close()
        for warning in [*assumed_devices(cfg, launcher), *seen.warnings, *too_much]:
            log.warning(warning)
        setup = [
            f"output: {job.output_path}",
            model_setup(plan, node_cfgs),
            *batch_lines(plan, node_cfgs),
            *choice_lines(plan),
        ]
        print(*setup, sep="\n", flush=True)  # before what workers write to the same file
        return _launch(launcher, job, cfg, plan)


def _launch(launcher: Launcher, job: Job, cfg: Config, plan: Plan) -> int:
    """Check the files that the run reads and writes, make its folder ready, start it."""
    goes_on = launcher == "torchrun" and is_first_on_machine() and goes_on_from(job.memory_dir)
    if launcher != "ray" and is_first_on_machine():  # Ray: on the machines that it chooses
        preflight(with_own_results(cfg) if goes_on else cfg, plan)
    if is_first_process():
        inputs = RunInputs(**job.inputs)
        open_folder(cfg, job.run_id, command_line(), anew=not goes_on, plan=plan, inputs=inputs)
        workers = f"{job.world_size} worker{'s' * (job.world_size != 1)}"
        print(f"starting {workers}; all output is below {job.output_path}", flush=True)
    try:
        return _launched(launcher, job, cfg)
    except UserError as error:
        if is_first_process():
            record_end(job.output_path, job.run_id, "failed", " ".join(str(error).split()))
        raise


def _launched(launcher: Launcher, job: Job, cfg: Config) -> int:
    """Start a run whose folder is ready; its exit code."""
    match launcher:
        case "torchrun":
            return run_torchrun(job)
        case "ray":
            from siirl.launch.ray import RayTrainer  # psutil and what else only Ray needs

            return RayTrainer(job, cfg).run()
        case "local":
            return run_local(job)


if __name__ == "__main__":
    sys.exit(main())
