"""A command line looked at as a whole: every check goes as far as what is wrong lets it."""

import contextlib
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

from siirl.compiler.checks.model_checks import check_trained_model
from siirl.compiler.choices import Kept, Machine
from siirl.compiler.choose import choose
from siirl.compiler.compile import compile_plan, load_dag
from siirl.compiler.plan import Plan
from siirl.compiler.plan_warnings import plan_warnings
from siirl.config import Config
from siirl.config.checks import contradictions, find_contradictions
from siirl.config.roles import ROLES, role_model
from siirl.dag.spec import DagSpec
from siirl.errors import DataError, Place, PlacementError, UserError
from siirl.findings import Findings, refuse
from siirl.launch.preflight import check_code, check_resumed, check_reward_code
from siirl.launch.run_folder import refuse_busy
from siirl.model_files.directory import check_lengths, check_score_model, check_stop_tokens
from siirl.model_files.hf_config import check_overrides
from siirl.model_files.local_models import with_local_configs


@dataclass(frozen=True)
class Survey:
    """What is known of a run before it starts."""

    cfg: Config
    plan: Plan | None = None
    """None where the workflow has none."""
    node_cfgs: dict[str, Config] = field(default_factory=dict)
    """Of each kept node."""
    warnings: list[str] = field(default_factory=list)
    """A line each."""
    data: list[str] = field(default_factory=list)
    """What the files of rows hold: a line for each split."""
    has_sizes: bool = False
    """There is a plan, and nothing is wrong with what the sizes of its models are read from."""
    asks_hub: bool = True
    """Whether a hub is asked for a config.json that is not here."""


def survey(cfg: Config, found: Findings) -> Survey:
    """Configuration and workflow: the same on every machine that has the DAG file. Problems go to `found`."""
    cfg = find_contradictions(cfg, found, lambda group: _trains(cfg, group))
    with found.at(Place.WORKFLOW):
        dag = load_dag(cfg)
        plan, node_cfgs = compile_plan(dag, cfg, cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node)
        _check_fewest(dag, cfg)
        return Survey(cfg, plan, node_cfgs)
    return Survey(cfg)


def _trains(cfg: Config, group: str) -> bool:
    """Whether the workflow trains the model of a group; where it cannot be read, which is said elsewhere, it
    may."""
    try:
        return trains_group(load_dag(cfg), group)
    except UserError:
        return True


def trains_group(dag: DagSpec, group: str) -> bool:
    """Whether a node of a DAG trains the model of a group of the configuration."""
    trained = (node.role.group for node in dag.nodes if node.node_type == "MODEL_TRAIN")
    return any(own and f"{group}.".startswith(f"{own}.") for own in trained)


def with_choices(seen: Survey, machine: Machine, kept: Kept | None = None) -> Survey:
    """The survey of a run in which the keys that nobody set are chosen (see choose), with its warnings.

    kept: what was chosen at the start of the run that this one goes on with. UserError: what was set does not
    go with what is chosen.
    """
    if seen.plan is None:
        return seen
    configs = dict(seen.node_cfgs)
    for model in seen.plan.models.values():
        with contextlib.suppress(DataError):  # without its config.json there is no estimate
            configs[model.node] = with_local_configs(configs[model.node], (model.role,), seen.asks_hub)
    plan, configs = choose(seen.plan, configs, machine, kept)
    found = Findings(Place.CONFIGURATION)
    known = {str(problem) for cfg in seen.node_cfgs.values() for problem in contradictions(cfg)}
    for cfg in configs.values() if plan.choices else ():
        found.take(problem for problem in contradictions(cfg) if str(problem) not in known)
    found.close()
    warnings = [*plan_warnings(seen.cfg, plan, configs), *seen.warnings]
    return dataclasses.replace(seen, plan=plan, node_cfgs=configs, warnings=list(dict.fromkeys(warnings)))


def _check_fewest(dag: DagSpec, cfg: Config) -> None:
    """The workflow also has a plan on the fewest machines with which the run is to go on."""
    most, least = cfg.trainer.nnodes, cfg.trainer.min_nnodes
    if least is None or least >= most:
        return
    few = dataclasses.replace(cfg, trainer=dataclasses.replace(cfg.trainer, nnodes=least))
    try:
        compile_plan(dag, few, least * cfg.trainer.n_gpus_per_node)
    except UserError as error:
        raise PlacementError(
            f"trainer.nnodes={least}:{most}: the run could not go on with {least} machine(s): {error}"
        ) from error


def survey_inputs(seen: Survey, elsewhere: bool, found: Findings) -> Survey:
    """The user's code, and models as far as they are here; unless elsewhere, also data and weights.

    The survey with configurations in which models that are named as on a hub have their config.json here.
    """
    if seen.plan is None:
        if not elsewhere:
            from siirl.launch.input_checks import check_named

            check_named(seen.cfg, found)
            check_reward_code(seen.cfg, found)
            check_resumed(seen.cfg, None, found)
        return seen
    configs, warnings, data = dict(seen.node_cfgs), list(seen.warnings), list[str]()
    for model in seen.plan.models.values():
        with found.at(Place.MODELS):
            try:
                configs[model.node] = with_local_configs(configs[model.node], (model.role,), seen.asks_hub)
            except DataError as error:
                warnings.append(str(error))
            folder = Path(role_model(configs[model.node], model.role).path).expanduser()
            if (folder / "config.json").is_file():
                check_overrides(configs[model.node], model.role)
                check_lengths(configs[model.node], folder, model.role)
                check_stop_tokens(configs[model.node], folder, model.role)
                refuse(check_trained_model(configs[model.node], model.role, f"model {model.name!r}"))
                if ROLES[model.role].head == "score":
                    check_score_model(configs[model.node], folder, model.role, model.trains)
    has_sizes = not len(found)
    check_code(seen.plan, configs, found)
    if not elsewhere:
        from siirl.launch.input_checks import check_inputs

        data = check_inputs(seen.cfg, seen.plan, seen.node_cfgs, found)
        check_resumed(seen.cfg, seen.plan, found)
        with found.at(Place.MACHINE):
            refuse_busy(seen.cfg)
    return dataclasses.replace(
        seen, node_cfgs=configs, warnings=list(dict.fromkeys(warnings)), data=data, has_sizes=has_sizes
    )
