"""The whole configuration: `Config`, and the list of all keys."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from siirl.config.actor import ActorConfig, CriticConfig, RefConfig
from siirl.config.algorithm import AlgorithmConfig
from siirl.config.aliases import ALIASES
from siirl.config.common import ModelConfig
from siirl.config.data import DataConfig
from siirl.config.keys import Key, group, walk
from siirl.config.reward import CustomRewardFunctionConfig, RewardModelConfig
from siirl.config.rollout import RolloutConfig
from siirl.config.serve import ServeConfig
from siirl.config.service import ServiceConfig
from siirl.config.teacher import FrozenConfig, TeacherConfig
from siirl.config.trainer import DagConfig, ProfilerConfig, RayInitConfig, TrainerConfig
from siirl.config.unused_keys import unused_keys


@dataclass(frozen=True)
class ActorRolloutRefConfig:
    """One policy: its model, its training, its rollout, its reference."""

    model: ModelConfig = group(ModelConfig, "model")
    actor: ActorConfig = group(ActorConfig, "training")
    ref: RefConfig = group(RefConfig, "reference model")
    rollout: RolloutConfig = group(RolloutConfig, "rollout")
    serve: ServeConfig = group(ServeConfig, "a program that plays the rollout's episodes")


@dataclass(frozen=True)
class Config:
    """A resolved configuration: read-only, attribute names are the keys, every value is typed and final.

    Values that follow another key (response_length follows data.max_response_length) are already filled in.
    Neither is a key itself: explicit, the keys that somebody set (command line, preset or node), sorted;
    unused, the values of those that do nothing, where they are not their defaults.
    """

    data: DataConfig = group(DataConfig, "prompts")
    actor_rollout_ref: ActorRolloutRefConfig = group(ActorRolloutRefConfig, "policy")
    critic: CriticConfig = group(CriticConfig, "value model")
    reward_model: RewardModelConfig = group(RewardModelConfig, "scores")
    teacher: TeacherConfig = group(TeacherConfig, "models that the policy learns from")
    frozen: FrozenConfig = group(FrozenConfig, "frozen models of nodes' own")
    custom_reward_function: CustomRewardFunctionConfig = group(
        CustomRewardFunctionConfig, "own reward function"
    )
    service: ServiceConfig = group(ServiceConfig, "clients that train here")
    algorithm: AlgorithmConfig = group(AlgorithmConfig, "advantages")
    trainer: TrainerConfig = group(TrainerConfig, "run")
    ray_init: RayInitConfig = group(RayInitConfig, "Ray")
    dag: DagConfig = group(DagConfig, "workflow")
    profiler: ProfilerConfig = group(ProfilerConfig, "profiles", when="profiler.enable")
    explicit: tuple[str, ...] = ()
    unused: Mapping[str, Any] = field(default_factory=dict)


@functools.cache
def all_keys() -> dict[str, Key]:
    """Full name -> Key of every key: those of the schema, those that do nothing, older names. Read-only."""
    keys = walk(Config()) | unused_keys()
    older = {name: replace(keys[meant[0]], name=name) for name, meant in ALIASES.items()}
    return keys | {name: replace(key, rule=replace(key.rule, within="")) for name, key in older.items()}


@functools.cache
def all_groups() -> frozenset[str]:
    """Full names of all groups."""
    return frozenset(
        name.rsplit(".", depth)[0] for name in all_keys() for depth in range(1, name.count(".") + 1)
    )


def get_group_class(name: str) -> type | None:
    """The schema class of a group, by its full name; None for one of keys that do nothing."""
    node: Any = Config()
    for part in name.split("."):
        node = getattr(node, part, None)
    return None if node is None else type(node)


TOP_GROUPS = tuple(dict.fromkeys(name.partition(".")[0] for name in all_keys()))
