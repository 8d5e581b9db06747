"""Older and duplicate names of keys: setting one sets the keys that it stands for."""

from collections.abc import Iterable

from siirl.config.common import FSDPConfig, MegatronConfig
from siirl.config.keys import walk

POLICY = "actor_rollout_ref"
TRAINING_KEYS = ("use_distributed_optimizer", "grad_offload", "optimizer_offload", "override_ddp_config")
"""Keys of sharding that only a model in training has."""
FSDP_KEYS, MEGATRON_KEYS = tuple(walk(FSDPConfig())), tuple(walk(MegatronConfig()))
MEGATRON_SIZES = tuple(
    name for name in MEGATRON_KEYS if name.endswith(("_parallel_size", "sequence_parallel"))
)


def _moved(old: str, names: Iterable[str], *groups: str) -> dict[str, tuple[str, ...]]:
    """The keys of an older group, each of which sets the keys of its name in other groups."""
    return {f"{old}.{name}": tuple(f"{group}.{name}" for group in groups) for name in names}


_ACTOR, _REF = f"{POLICY}.actor", f"{POLICY}.ref"
_FORWARD_FSDP = tuple(name for name in FSDP_KEYS if name not in TRAINING_KEYS)
FORWARD_MEGATRON = tuple(name for name in MEGATRON_KEYS if name not in TRAINING_KEYS)

RANGES = {"trainer.nnodes": "trainer.min_nnodes"}
"""Keys that may be given as MIN:MAX, which is their own value: MAX, and that of another key: MIN."""

ALIASES: dict[str, tuple[str, ...]] = {
    "data.columns.prompt": ("data.prompt_key",),
    "data.columns.data_source": ("data.reward_fn_key",),
    "data.columns.images": ("data.image_key",),
    "data.filter_overlong_prompt": ("data.filter_overlong_prompts",),
    f"{_ACTOR}.optim.clip_grad": (f"{_ACTOR}.grad_clip",),
    f"{_ACTOR}.param_offload": (f"{_ACTOR}.fsdp_config.param_offload",),
    f"{_ACTOR}.optimizer_offload": (f"{_ACTOR}.fsdp_config.optimizer_offload",),
    f"{_ACTOR}.checkpoint.contents": (
        f"{_ACTOR}.checkpoint.save_contents",
        f"{_ACTOR}.checkpoint.load_contents",
    ),
    f"{_REF}.param_offload": (f"{_REF}.fsdp_config.param_offload",),
    "critic.optim.clip_grad": ("critic.grad_clip",),
    "critic.checkpoint.contents": ("critic.checkpoint.save_contents", "critic.checkpoint.load_contents"),
    **_moved("critic.model.fsdp_config", FSDP_KEYS, "critic.fsdp_config"),
    **_moved(f"{POLICY}.model.fsdp_config", _FORWARD_FSDP, f"{_ACTOR}.fsdp_config", f"{_REF}.fsdp_config"),
    **_moved(f"{POLICY}.model.fsdp_config", ("optimizer_offload",), f"{_ACTOR}.fsdp_config"),
    **_moved(f"{POLICY}.model.megatron", FORWARD_MEGATRON, f"{_ACTOR}.megatron", f"{_REF}.megatron"),
    **_moved(f"{POLICY}.model.megatron", TRAINING_KEYS, f"{_ACTOR}.megatron"),
    **_moved("critic.model.megatron", MEGATRON_KEYS, "critic.megatron"),
    **_moved("reward_model.model.fsdp_config", FSDP_KEYS, "reward_model.fsdp_config"),
    **_moved("reward_model.model.megatron", MEGATRON_KEYS, "reward_model.megatron"),
}
