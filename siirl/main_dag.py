"""`python -m siirl.main_dag key=value ...`: compose and check the configuration, compile the plan, launch."""

import logging
import sys
from pathlib import Path

from siirl.config import Config, load_config, to_dict
from siirl.config.checks import check_config, effect_warnings
from siirl.config.tree import print_config
from siirl.dag.arguments import parse_arguments, print_text, user_errors
from siirl.dag.compile import compile_plan, load_dag
from siirl.dag.report import batch_arithmetic
<<<<<<< HEAD
from siirl.launch.choose import choose_launcher
=======
from siirl.dag.user_code import check_reference
from siirl.data.inspect import data_sources, inspect_data
from siirl.data.model_files import check_model_files, check_tokenizer
from siirl.engines.rollout.vllm_version import vllm_version
from siirl.errors import ConfigError
>>>>>>> 372fb56 (vllm is a rollout: its keys act, its version is checked before the start; GPU benchmark of the main job)
from siirl.launch.devices import check_gpus
from siirl.launch.job import Job
from siirl.launch.local import run_local
from siirl.launch.preflight import preflight
from siirl.launch.ray import RayTrainer
from siirl.launch.torchrun import is_first_on_machine, is_first_process, run_torchrun
from siirl.observe.logs import setup_logging

log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 it ended well, 2 the user's input cannot work, 1 it failed, 130 or 143 it was stopped."""
    with user_errors() as outcome:
        arguments = parse_arguments(argv)
        cfg = load_config(arguments.overrides, arguments.config_name)
        if arguments.cfg == "job":
            print_text(print_config(cfg))
            return 0
        return run(cfg)
    return outcome.code


def run(cfg: Config) -> int:
    """Check everything that can be checked before a worker starts, then run the job to its end."""
    check_config(cfg)
    launcher = choose_launcher(cfg)
    if launcher == "local":
        check_gpus(cfg)
    world_size = cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node
    plan, node_cfgs = compile_plan(load_dag(cfg), cfg, world_size)
    output_dir = Path(cfg.trainer.output_dir).expanduser().absolute()
    if is_first_process():
        setup_logging(0, output_dir / "logs")
        for warning in effect_warnings(cfg):
            log.warning(warning)
    if launcher != "ray" and is_first_on_machine():  # Ray: on the machines that it chooses
        preflight(cfg, plan)
    if is_first_process():
        print(batch_arithmetic(plan, node_cfgs))
    job = Job(to_dict(cfg), plan.to_json(), str(output_dir), world_size, cfg.trainer.n_gpus_per_node)
<<<<<<< HEAD
    match launcher:
        case "torchrun":
            return run_torchrun(job)
        case "ray":
            return RayTrainer(job, cfg).run()
        case "local":
            return run_local(job)
=======
    return run_torchrun(job) if launcher == "torchrun" else run_local(job)


def preflight(cfg: Config, plan: Plan, node_cfgs: dict[str, Config]) -> None:
    """UserError for data, models, user code and directories that the run would trip over later.

    Runs nothing of the user's and needs no torch; reads metadata, and the data sources of the prompts.
    """
    for loader in plan.loaders.values():
        inspect_data(node_cfgs[loader.node])
    for model in plan.models.values():
        check_model_files(node_cfgs[model.node], model.role)
        if model.role != "rollout":
            check_kernels(node_cfgs[model.node], model.role)
        if model.backend == "vllm":
            vllm_version()
    for name, node in plan.nodes.items():
        check_tokenizer(node_cfgs[name])
        if node.executable is not None:
            check_reference(node.executable, f"node {name!r}")
        if node.op == "function_reward":
            check_rewards(node_cfgs[name])
    check_writable(Path(cfg.trainer.output_dir).expanduser(), "trainer.output_dir")
    if cfg.trainer.save_freq > 0:
        check_writable(Path(cfg.trainer.default_local_dir).expanduser())
    if cfg.trainer.resume_mode == "resume_path":
        given_checkpoint(cfg.trainer.resume_from_path)


def check_kernels(cfg: Config, role: str) -> None:
    """ConfigError if the kernels that the model of a role asks for are not installed."""
    if role_model(cfg, role).use_liger and importlib.util.find_spec("liger_kernel") is None:
        raise ConfigError(
            f"{model_key(role)}.use_liger=True: the package liger-kernel is not installed. Install it "
            "(pip install 'siirl[liger]'), or set use_liger=False."
        )


def check_rewards(cfg: Config) -> None:
    """ConfigError unless there is a reward function for every data source, or the user's can be called."""
    check_user_function(cfg)
    chooser = RewardChooser(cfg)
    if not chooser.custom:
        chooser.check(data_sources(cfg))
>>>>>>> 372fb56 (vllm is a rollout: its keys act, its version is checked before the start; GPU benchmark of the main job)


if __name__ == "__main__":
    sys.exit(main())
