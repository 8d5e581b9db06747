"""Where prompts may have images (data.dataset_type=vlm), and where not yet. Pure."""

from collections.abc import Iterator

from siirl.compiler.backends import ROLLOUT_BACKENDS
from siirl.compiler.resolved_node import ResolvedNode
from siirl.compiler.workflow import Workflow
from siirl.errors import DagError, NotSupportedError, UserError


def check_images(kept: Workflow) -> Iterator[UserError]:
    """The nodes agree on the kind of dataset, and their rollouts take its images."""
    kind = kept.run.data.dataset_type
    for node in kept.nodes.values():
        if node.cfg.data.dataset_type != kind:
            yield DagError(
                f"{node} has data.dataset_type={node.cfg.data.dataset_type} and the run {kind}: one loader "
                "reads the prompts of all nodes. Set it on the command line."
            )
        elif node.op.is_rollout and node.cfg.data.has_images:
            yield from _of_a_rollout(node, kept)
        elif node.op.role is not None and node.op.role.is_teacher and node.cfg.data.has_images:
            yield NotSupportedError(
                f"not supported yet: {node}: a teacher of prompts with images (data.dataset_type=vlm): it is "
                "given tokens alone. Remove the node, or the images."
            )


def _of_a_rollout(node: ResolvedNode, kept: Workflow) -> Iterator[UserError]:
    images = f"not supported yet: {node}: images in prompts (data.dataset_type=vlm)"
    rollout = node.cfg.actor_rollout_ref.rollout
    taking = [name for name, backend in ROLLOUT_BACKENDS.items() if backend.takes_images]
    plans = kept.interactions.values()
    if any(plan.program and node.id in [stage.node for stage in plan.stages] for plan in plans):
        yield NotSupportedError(
            f"{images} of episodes that a program plays (actor_rollout_ref.serve): its messages are texts. "
            "Let an environment or tools show the images, or remove actor_rollout_ref.serve."
        )
    elif rollout.name not in taking:
        yield NotSupportedError(
            f"{images} with rollout.name={rollout.name}, which is given tokens alone. Set rollout.name to "
            f"{' or '.join(taking)}."
        )
    elif rollout.name == "vllm" and rollout.tensor_model_parallel_size > 1:
        yield NotSupportedError(
            f"{images} with rollout.tensor_model_parallel_size={rollout.tensor_model_parallel_size}: the "
            "processes that vLLM starts for an engine of several ranks do not take patches. Set it to 1."
        )
