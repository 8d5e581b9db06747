"""What a node that is asked from outside goes with. Pure."""

from collections.abc import Iterator

from siirl.compiler.workflow import Workflow
from siirl.errors import ConfigError, DagError, NotSupportedError, UserError


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
    if world > 1:
        yield NotSupportedError(
            f"not supported yet: {asked} on {world} ranks: a service is one process on one device. Set "
            "trainer.n_gpus_per_node=1 and trainer.nnodes=1."
        )
    if rollout.name != "hf":
        yield NotSupportedError(
            f"not supported yet: {asked} with rollout.name={rollout.name}: samples of clients' adapters come "
            "from hf. Set rollout.name=hf."
        )
    strategy = asked.cfg.actor_rollout_ref.actor.strategy
    if strategy != "fsdp":
        yield NotSupportedError(
            f"not supported yet: {asked} with actor.strategy={strategy}: gradients are added up by request "
            "under fsdp. Set actor_rollout_ref.actor.strategy=fsdp."
        )
