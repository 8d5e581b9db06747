"""What a run reads on this machine: data, models and packages. No torch.

pyarrow takes a fifth of a second to import: who may not need this file imports it where it is used.
"""

import importlib.util
from collections.abc import Collection, Mapping, Sequence

from siirl.agents.environments import check_packaged
from siirl.agents.task_run import check_sandbox, check_turns
from siirl.agents.tool_files import check_tools_here
from siirl.compiler.backends import backend_of
from siirl.compiler.checks.model_checks import check_trained_model
from siirl.compiler.plan import ModelPlan, Plan
from siirl.config import Config
from siirl.config.batch import batch_of
from siirl.config.common import FLA, FLASH_4
from siirl.config.reward_weights import RewardWeights
from siirl.config.roles import ROLES, normalizes_weights, role_model
from siirl.dag.ops import score_names
from siirl.data.check_files import data_sources, inspect_data
from siirl.data.curriculum import check_difficulties
from siirl.data.data_files import list_files, read_columns
from siirl.data.dataset_columns import Columns
from siirl.data.mixture import check_mixture
from siirl.data.recorded_rollouts import check_recorded
from siirl.data.row_checks import count_rows
from siirl.data.row_values import value_at, values_of
from siirl.errors import ConfigError, DataError, Place
from siirl.findings import Findings
from siirl.model_files.directory import check_model_files, check_tokenizer
from siirl.model_files.local_models import on_hub
from siirl.model_files.vocabulary import check_distributions, check_pieces, check_same_words
from siirl.observe.loggers import check_installed
from siirl.rewards.by_data_source import RewardChooser
from siirl.user_code.extras import env_package


def check_routes(cfg: Config, by: str, takes: Collection[str], who: str) -> None:
    """DataError, with the row, unless the training files have a teacher for each row.

    by: data_source, or extra_info.NAME; takes: the values that teachers take; who: who learns.
    """
    field, _, path = by.partition(".")
    column = cfg.data.reward_fn_key if field == "data_source" else field
    for file in list_files(cfg.data.train_files):
        rows = Columns.of(cfg.data).open(file)
        if column not in rows.schema.names:
            raise DataError(
                f"{file} has no column {column!r}, by which {who} has teachers (teacher.by={by}): it has "
                f"{', '.join(rows.schema.names)}. Set teacher.by, or leave out teacher.takes."
            )
        values = values_of(read_columns(file, rows, [column]), column, str(file))
        for row, value in enumerate(values):
            if str(value_at(value, path)) not in takes:
                raise DataError(
                    f"{file}: row {row} has {by}={value_at(value, path)!r}: no teacher of {who} takes it, "
                    f"they take {', '.join(sorted(takes))}. Name it in teacher.takes of one, or let one take "
                    "all rows (no teacher.takes)."
                )


def check_inputs(cfg: Config, plan: Plan, node_cfgs: Mapping[str, Config], found: Findings) -> list[str]:
    """Data, models and packages that a run on this machine lacks; returns what the data holds, in lines.

    cfg: of the run; node_cfgs: of each node. Reads the prompts and right answers of the data, and metadata of
    the models. A model that is named as on a hub is left out.
    """
    check_packages(plan, node_cfgs, found)
    with found.at(Place.MACHINE):
        check_installed(cfg.trainer.logger)
    so_far = len(found)
    for loader in plan.loaders.values():
        with found.at(Place.DATA):
            inspect_data(node_cfgs[loader.node], _is_scored(plan, loader.agent))
    for loader in plan.loaders.values() if len(found) == so_far else ():
        with found.at(Place.DATA):
            check_difficulties(node_cfgs[loader.node])
            check_mixture(node_cfgs[loader.node])
    if len(found) == so_far:
        check_sources(plan, node_cfgs, found)
    told = check_rows(plan, node_cfgs, found) if len(found) == so_far else []
    check_taught(plan, node_cfgs, len(found) == so_far, found)
    for model in plan.models.values():
        check_model(node_cfgs[model.node], model, found)
    for name, node in plan.nodes.items():
        cfg = node_cfgs[name]
        with found.at(Place.MODELS):
            if not on_hub(cfg.data.tokenizer or cfg.actor_rollout_ref.model.path):
                check_tokenizer(cfg)
        with found.at(Place.DATA):
            if "recordings" in node.needs:
                check_recorded(cfg, node.agent)
    return told


def _is_scored(plan: Plan, agent: int) -> bool:
    """Whether a reward function is given the prompts of a loader: those of an interaction by any agent."""
    talking = {stage.agent for talk in plan.interactions.values() for stage in talk.stages}
    agents = talking if agent in talking else {agent}
    return any("scorer" in node.needs and node.agent in agents for node in plan.nodes.values())


def check_sources(plan: Plan, node_cfgs: Mapping[str, Config], found: Findings) -> None:
    """Every data source of the prompts has its reward functions, and its weights."""
    for name, node in plan.nodes.items():
        cfg = node_cfgs[name]
        with found.at(Place.REWARDS):
            if "scorer" in node.needs:
                check_data_sources(cfg)
            if node.spec.combines:
                check_weights(cfg, [key.name for key in plan.run_of(name).reads])


def check_rows(plan: Plan, node_cfgs: Mapping[str, Config], found: Findings) -> list[str]:
    """Each prompt and right answer of the data can be read; returns how many rows there are, by source."""
    scored = {node.agent: node_cfgs[name] for name, node in plan.nodes.items() if "scorer" in node.needs}
    told: list[str] = []
    for loader in plan.loaders.values():
        with found.at(Place.DATA):
            chooser = RewardChooser(scored[loader.agent]) if loader.agent in scored else None
            counts = count_rows(node_cfgs[loader.node], chooser.check_truth if chooser else None)
            told += map(str, counts)
    return list(dict.fromkeys(told))


def check_data_sources(cfg: Config) -> None:
    """ConfigError unless there is a reward function for every data source."""
    chooser = RewardChooser(cfg)
    if not chooser.custom:
        chooser.check(data_sources(cfg))


def check_weights(cfg: Config, reads: Sequence[str]) -> None:
    """ConfigError unless the rewards of every data source have weights."""
    weights = RewardWeights(cfg.reward_model.weights, score_names(reads), normalizes_weights(cfg))
    for source in sorted(data_sources(cfg)):
        weights.parts(source)


def check_taught(plan: Plan, node_cfgs: Mapping[str, Config], reads_data: bool, found: Findings) -> None:
    """Teachers have the policy's vocabulary, and each row of the training data has one."""
    nodes = [(name, node) for name, node in plan.nodes.items() if node.spec.teaches]
    for agent in {node.agent for _, node in nodes}:
        teachers = {name: node.model or name for name, node in nodes if node.agent == agent}
        for node, name in teachers.items():
            with found.at(Place.MODELS):
                group = node_cfgs[node].teacher
                if group.model.path:
                    (check_pieces if group.is_aligned else check_same_words)(node_cfgs[node], name)
            with found.at(Place.CONFIGURATION):
                if name in plan.models:
                    rows = batch_of(node_cfgs[node]).rows
                    check_distributions(node_cfgs[node], name, -(-rows // _fewest_shards(plan, name)))
        groups = [node_cfgs[node].teacher for node in teachers]
        loader = next((x for x in plan.loaders.values() if x.agent == agent), None)
        if reads_data and loader is not None and all(group.takes for group in groups):
            takes = {value for group in groups for value in group.takes}
            with found.at(Place.DATA):
                check_routes(node_cfgs[loader.node], groups[0].by, takes, f"agent {agent}")


def _fewest_shards(plan: Plan, teacher: str) -> int:
    """Of the teacher, or of the policies of its agent that learn from it."""
    agent = plan.models[teacher].agent
    trained = {node.model for node in plan.nodes.values() if node.agent == agent and node.spec.trains_policy}
    return min(plan.models[name].dims.dp for name in {teacher, *filter(None, trained)})


def check_model(cfg: Config, model: ModelPlan, found: Findings) -> None:
    """The files of a model, and the packages that its engine needs."""
    with found.at(Place.MODELS):
        if not on_hub(role_model(cfg, model.role).path):
            check_model_files(cfg, model.role, model.trains)
    with found.at(Place.MODELS):
        role = ROLES[model.role]
        if role.of_node and not role.is_teacher:  # of teachers it is said with what they teach
            check_same_words(cfg, model.name, model.role)
    with found.at(Place.MODELS):
        if not model.generates:
            check_kernels(cfg, model.role)
    with found.at(Place.MODELS):
        backend_of(model).packages(cfg, model.role)


def check_kernels(cfg: Config, role: str) -> None:
    """ConfigError if the model of a role asks for kernels that are not installed."""
    model = role_model(cfg, role)
    kernels = model.attention_kernels
    module, package = {FLASH_4: ("flash_attn", "flash-attn-4"), FLA: ("fla", "fla-core")}.get(
        kernels, ("", "")
    )
    if module and importlib.util.find_spec(module) is None:
        raise ConfigError(
            f"{ROLES[role].model}.attention_kernels={kernels}: the package {package} is not installed. "
            f"Install it (pip install 'siirl[{kernels.replace('flash_attn_4', package)}]'), or set "
            "attention_kernels=torch."
        )
    if model.use_liger and importlib.util.find_spec("liger_kernel") is None:
        raise ConfigError(
            f"{ROLES[role].model}.use_liger=True: the package liger-kernel is not installed. Install it "
            "(pip install 'siirl[liger]'), or set use_liger=False."
        )


def check_packages(plan: Plan, node_cfgs: Mapping[str, Config], found: Findings) -> None:
    """Environments of packages that are not installed, or that cannot be made; servers of tools likewise."""
    for interaction in plan.interactions.values():
        with found.at(Place.MACHINE):
            if interaction.program and interaction.program["sandbox"] is not None:
                check_sandbox(interaction.program["sandbox"], f"node {interaction.entry!r}: serve.sandbox")
        for stage in interaction.speaking:
            multi_turn = node_cfgs[stage.node].actor_rollout_ref.rollout.multi_turn
            with found.at(Place.MACHINE):
                if multi_turn.enable:
                    check_tools_here(multi_turn, f"node {stage.node!r}")
        for stage in interaction.acting:
            with found.at(Place.MACHINE):
                if stage.env:
                    check_turns(stage.env.path, stage.env.kwargs, stage.max_turns, f"node {stage.node!r}")
                if stage.env and env_package(stage.env.path):
                    check_packaged(stage.env.path, f"node {stage.node!r}: env_path", stage.env.kwargs)


def check_named(cfg: Config, found: Findings) -> None:
    """Data and model that the run's own keys name, where no plan says whose they are."""
    model = "actor_rollout_ref.model.path" in cfg.explicit
    with found.at(Place.DATA):
        if "data.train_files" in cfg.explicit or "data.val_files" in cfg.explicit:
            inspect_data(cfg)
    with found.at(Place.MODELS):
        if model and not on_hub(cfg.actor_rollout_ref.model.path):
            check_model_files(cfg, "actor", of_known_type=_is_said(cfg, found))
    with found.at(Place.MODELS):
        if (model or "data.tokenizer" in cfg.explicit) and not on_hub(
            cfg.data.tokenizer or cfg.actor_rollout_ref.model.path
        ):
            check_tokenizer(cfg)


def _is_said(cfg: Config, found: Findings) -> bool:
    """Whether a node was refused for the type of the run's own model, or for what is asked of it."""
    reasons = [str(error).partition(", ")[2] for error in check_trained_model(cfg, "actor", "the model")]
    return any(why in str(problem) for why in reasons for problem in found.problems)
