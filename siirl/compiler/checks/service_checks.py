"""What a node that is asked from outside goes with. Pure."""

from collections.abc import Iterator

from siirl.compiler.workflow import Workflow
from siirl.config import Config
from siirl.errors import ConfigError, DagError, NotSupportedError, UserError
from siirl.models.adapter_targets import ADAPTED
from siirl.models.config_json import config_json
from siirl.models.sizes import num_experts


def check_asked(kept: Workflow, world: int) -> Iterator[UserError]:
    """What a service cannot do, and what it has not learnt yet."""
    asked = next((node for node in kept.nodes.values() if node.op.is_asked), None)
    if asked is None:
        return
    model, rollout = asked.cfg.actor_rollout_ref.model, asked.cfg.actor_rollout_ref.rollout
    if len(kept.nodes) > 1:
        yield DagError(
            f"{asked} is one of {len(kept.nodes)} nodes: a service takes its clients' requests and no rows, "
            "so nothing can stand beside it. Let it be the only node (dag_templates/serve.yaml)."
        )
    if not asked.cfg.service.enable:
        yield ConfigError(
            f"{asked}: service.enable=false: its keys would do nothing. Start it by `siirl serve`, or set "
            "service.enable=true."
        )
    if model.lora_rank < 1:
        yield ConfigError(
            f"{asked}: actor_rollout_ref.model.lora_rank={model.lora_rank}: clients train adapters, and this "
            "is the largest rank that they may ask for. Set it to 1 or more."
        )
    if rollout.name not in ("hf", "vllm"):
        yield NotSupportedError(
            f"not supported yet: {asked} with rollout.name={rollout.name}: samples of clients' adapters come "
            "from vllm and hf. Set one of them."
        )
    for value, key, why in not_in_shared_passes(asked.cfg):
        yield NotSupportedError(f"not supported yet: {asked} with {key}={value}: {why}")
    strategy = asked.cfg.actor_rollout_ref.actor.strategy
    if strategy != "fsdp":
        yield NotSupportedError(
            f"not supported yet: {asked} with actor.strategy={strategy}: gradients are added up by request "
            "under fsdp. Set actor_rollout_ref.actor.strategy=fsdp."
        )


def not_in_shared_passes(cfg: Config) -> Iterator[tuple[object, str, str]]:
    """What the passes that clients share do not go with: the value, its key, and why."""
    actor, model = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.model
    keys = "actor_rollout_ref"
    if actor.fsdp_config.float8:
        yield True, f"{keys}.actor.fsdp_config.float8", "adapters multiply in the type of weights. Unset it."
    if actor.ulysses_sequence_parallel_size > 1:
        size = actor.ulysses_sequence_parallel_size
        why = "ranks have sequences of their own. Set it to 1."
        yield size, f"{keys}.actor.ulysses_sequence_parallel_size", why
    if num_experts(config_json(model)) and not set(model.target_modules) <= set(ADAPTED):
        fix = (
            f"clients' adapters are on linear layers, which experts are not. Set it to [{','.join(ADAPTED)}]."
        )
        yield model.target_modules, f"{keys}.model.target_modules", fix
