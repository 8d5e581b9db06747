"""Where experts that were chosen once are used again (actor.router_replay), and where not yet. Pure."""

from collections.abc import Iterator

from siirl.compiler.backends import ROLLOUT_BACKENDS, TRAIN_BACKENDS, Backend
from siirl.compiler.resolved_node import ResolvedNode
from siirl.compiler.workflow import Workflow
from siirl.errors import NotSupportedError, UserError
from siirl.models.config_json import as_built
from siirl.models.families import family_of
from siirl.models.sizes import router_choices
from siirl.types import EXPERT_FIELDS

OFF = "Set actor_rollout_ref.actor.router_replay.mode=disabled"


def check_router_replay(kept: Workflow) -> Iterator[UserError]:
    """The policy's experts can be replayed, and its rollout says which they are."""
    for node in kept.nodes.values():
        actor = node.cfg.actor_rollout_ref.actor
        mode = f"not supported yet: {node}: actor.router_replay.mode={actor.router_replay.mode}"
        if actor.router_replay.mode == "disabled":
            continue
        problem = ""
        if node.op.trains_policy:
            problem = _of_a_trainer(node)
        elif node.op.gives_data or any(
            key.name in EXPERT_FIELDS for key in node.writes if node.op.is_rollout
        ):
            problem = _of_a_rollout(node)
        if problem:
            yield NotSupportedError(f"{mode} {problem}")


def _of_a_trainer(node: ResolvedNode) -> str:
    actor, model = node.cfg.actor_rollout_ref.actor, node.cfg.actor_rollout_ref.model
    if problem := TRAIN_BACKENDS[actor.strategy].no_replay(actor):
        return problem
    config = as_built(model)
    if "num_hidden_layers" not in config:
        return ""  # said by others
    choices, kind = router_choices(config), config.get("model_type")
    experts = family_of(kind).experts
    if choices is None:
        return f"for a {kind} without experts, or with other numbers of them in each layer. {OFF}."
    if experts is None or not experts.replayed:
        return f"for a {kind}, whose router was not seen to take given experts. {OFF}."
    return ""


def _of_a_rollout(node: ResolvedNode) -> str:
    name, known = node.cfg.actor_rollout_ref.rollout.name, ROLLOUT_BACKENDS

    def why_none(backend: Backend) -> str:
        return backend.no_experts or backend.no_experts_here(node.cfg)

    why = why_none(known[name]) if name in known else Backend.no_experts
    saying = " or ".join(other for other, backend in known.items() if not why_none(backend))
    return f"with rollout.name={name}: {why}. {OFF}, or rollout.name={saying}." if why else ""
