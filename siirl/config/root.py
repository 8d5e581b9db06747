"""The whole configuration: `Config`, and the list of all keys."""

import functools
from dataclasses import dataclass, fields

from siirl.config.actor import EMBODIED, PROFILER, ActorConfig, RefConfig
from siirl.config.algorithm import AlgorithmConfig
from siirl.config.common import ModelConfig
from siirl.config.critic import CriticConfig
from siirl.config.data import DataConfig
from siirl.config.keys import Key, group, key, walk
from siirl.config.reward import CustomRewardFunctionConfig, RewardModelConfig
from siirl.config.rollout import RolloutConfig
from siirl.config.trainer import DagConfig, ProfilerConfig, RayInitConfig, TrainerConfig


@dataclass(frozen=True)
class EmbodiedEnvConfig:
    """Simulated environment of an embodied agent."""

    env_type: str = key("libero", "kind of environment")
    env_name: str = key("libero_10", "task suite")
    num_envs: int = key(16, "environments at once")
    max_steps: int = key(512, "longest episode")
    num_trials_per_task: int = key(50, "episodes of a task")
    num_steps_wait: int = key(10, "idle steps at the start")
    model_family: str = key("openvla", "family of the policy")


@dataclass(frozen=True)
class EmbodiedConfig:
    """Embodied agents."""

    env: EmbodiedEnvConfig = group(EmbodiedEnvConfig, "environment")
    embodied_type: str = key("openvla", "kind of policy")
    model_path: str = key("openvla/openvla-7b", "policy")
    video_embedding_model_path: str = key("~/models/vjepa/vitg-384.pt", "video model of the reward")
    action_chunks_len: int = key(8, "actions of a chunk")
    action_token_len: int = key(7, "tokens of an action")
    embedding_img_size: int = key(384, "image size of the video model")
    embedding_enable_fp16: bool = key(True, "half precision in the video model")
    embedding_model_class: str | None = key(None, "class of the video model")
    embedding_model_offload: bool = key(False, "keep the video model in host memory")
    num_images_in_input: int = key(1, "images of an observation")
    center_crop: bool = key(True, "crop images")
    unnorm_key: str = key("libero_10", "statistics of actions")
    temperature: float = key(1.6, "sampling temperature")
    n_gpus_per_node: int = key(8, "devices of each machine")


@dataclass(frozen=True)
class ActorRolloutRefConfig:
    """One policy: its model, its training, its rollout, its reference."""

    hybrid_engine: bool = key(
        True, "trainer and rollout share ranks", ignored="placement in the DAG decides which ranks run what"
    )
    model: ModelConfig = group(ModelConfig, "model")
    actor: ActorConfig = group(ActorConfig, "training")
    ref: RefConfig = group(RefConfig, "reference model")
    rollout: RolloutConfig = group(RolloutConfig, "rollout")
    embodied: EmbodiedConfig = group(EmbodiedConfig, "embodied agents", later=EMBODIED)


@dataclass(frozen=True)
class Config:
    """A resolved configuration: read-only, attribute names are the keys, every value is typed and final.

    Values that follow another key (response_length follows data.max_response_length) are already filled in.
    explicit: the keys that somebody set (command line, preset or node), sorted; not a key itself.
    """

    data: DataConfig = group(DataConfig, "prompts")
    actor_rollout_ref: ActorRolloutRefConfig = group(ActorRolloutRefConfig, "policy")
    critic: CriticConfig = group(CriticConfig, "value model")
    reward_model: RewardModelConfig = group(RewardModelConfig, "scores")
    custom_reward_function: CustomRewardFunctionConfig = group(
        CustomRewardFunctionConfig, "own reward function"
    )
    algorithm: AlgorithmConfig = group(AlgorithmConfig, "advantages")
    trainer: TrainerConfig = group(TrainerConfig, "run")
    ray_init: RayInitConfig = group(RayInitConfig, "Ray")
    dag: DagConfig = group(DagConfig, "workflow")
    profiler: ProfilerConfig = group(ProfilerConfig, "profiler", later=PROFILER)
    explicit: tuple[str, ...] = ()


@functools.cache
def all_keys() -> dict[str, Key]:
    """Full name -> Key of every key, in declaration order. Treat as read-only."""
    return walk(Config())


@functools.cache
def all_groups() -> frozenset[str]:
    """Full names of all groups."""
    return frozenset(
        name.rsplit(".", depth)[0] for name in all_keys() for depth in range(1, name.count(".") + 1)
    )


def get_group_class(name: str) -> type:
    """The schema class of a group, by its full name."""
    return type(functools.reduce(getattr, name.split("."), Config()))


TOP_GROUPS = tuple(item.name for item in fields(Config) if item.name != "explicit")
