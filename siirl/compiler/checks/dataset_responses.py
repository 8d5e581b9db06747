"""What must hold where responses come with the dataset (rollout.name=dataset), and what trains on them."""

from collections.abc import Iterator

from siirl.compiler.plan import Plan
from siirl.compiler.plan_instructions import Run
from siirl.compiler.resolved_node import ResolvedNode
from siirl.compiler.workflow import Workflow
from siirl.config import Config
from siirl.errors import ConfigError, DagError, NotSupportedError, UserError

VALIDATES = "trainer.val_before_train=false trainer.test_freq=-1"


def check_given(kept: Workflow) -> Iterator[UserError]:
    """Responses of a dataset are imitated, by a policy of their agent or of one that samples."""
    for agent, rollout in kept.rollouts.items():
        if not rollout.op.gives_data:
            continue
        trainers = [x for x in kept.nodes.values() if x.agent == agent and x.op.trains_policy]
        for trainer in trainers:
            actor = trainer.cfg.actor_rollout_ref.actor
            if not actor.imitates:
                yield DagError(
                    f"{trainer} trains the responses of a dataset ({rollout}) by "
                    f"actor.policy_loss.loss_mode={actor.loss_name}, which is for responses that the policy "
                    "has sampled. Set loss_mode=sft or dpo, or distill with distill.top_k=64, for one, or "
                    "-1; or sample: rollout.name=vllm."
                )
            elif actor.loss.pairs and rollout.shares is not None:
                yield NotSupportedError(
                    f"not supported yet: {trainer}: loss_mode={actor.loss_name} of a policy that agent "
                    f"{rollout.shares} samples from: it is compared with the model that the run begins with. "
                    "Remove rollout.agent.share_instance, and train in a run of its own."
                )
        if rollout.shares is not None:
            yield from _check_share(rollout, rollout.shares, kept)


def check_pairs(kept: Workflow) -> Iterator[UserError]:
    """NotSupportedError for pairs among the rows of a conversation: an episode may have any number."""
    for node in kept.nodes.values():
        actor = node.cfg.actor_rollout_ref.actor
        if node.op.trains_policy and actor.loss.pairs and node.agent in kept.talking:
            yield NotSupportedError(
                f"not supported yet: {node}: loss_mode={actor.loss_name} in an interaction, whose "
                "episodes may have any number of rows. Train by another loss."
            )


def _check_share(rollout: ResolvedNode, owner: int, kept: Workflow) -> Iterator[UserError]:
    """The policy that is trained on responses of the data is another agent's, which samples from it."""
    key = f"{rollout}: rollout.agent.share_instance = {owner}"
    target = kept.rollouts.get(owner)
    own = [x for x in kept.nodes.values() if x.op.trains_policy and x.agent == x.model_agent == owner]
    if target is None or target.op.gives_data or not own:
        yield DagError(
            f"{key}: agent {owner} does not train a policy that it samples from. Name the agent_group of one "
            "that has a rollout and an ACTOR node; or remove it: the agent then has a policy of its own."
        )
        return
    if target.cfg.actor_rollout_ref.rollout.max_lag:
        yield NotSupportedError(
            f"not supported yet: {key}: {target} has rollout.max_lag: its rollouts are asynchronous, "
            "and would continue while these are trained. Set rollout.max_lag=0."
        )
    if any(
        x.op.role is not None and x.op.role.is_reference and x.agent == owner for x in kept.nodes.values()
    ):
        yield NotSupportedError(
            f"not supported yet: {key}: the reference of agent {owner} has the weights of before the "
            "dataset's responses were learnt, so its KL would pull the policy back. Train on them in a run "
            "of its own, and start from its hf_model; or do without the KL (actor.use_kl_loss=false)."
        )


def check_order(plan: Plan) -> Iterator[UserError]:
    """DagError if a policy is trained on responses of the data between its rollout and the update on that.

    The update would take log-probs of weights that have not sampled its rows.
    """
    place = {ins.node: index for index, ins in enumerate(plan.instructions) if isinstance(ins, Run)}
    for model in plan.models.values():
        trainers = [plan.nodes[name] for name in model.nodes if plan.nodes[name].spec.trains]
        owner = next((node for node in trainers if node.agent == model.agent), None)
        if not model.is_policy or owner is None:
            continue
        samples = [node for node in plan.nodes.values() if node.agent == model.agent and node.spec.is_rollout]
        for node in trainers:
            for rollout in samples if node is not owner else ():
                if place[rollout.name] < place[node.name] < place[owner.name]:
                    yield DagError(
                        f"node {node.name!r} trains {model.name} between {rollout.name!r}, which samples "
                        f"from it, and {owner.name!r}, which trains on the samples. Declare it, and the "
                        f"nodes above it, before {rollout.name!r}."
                    )


def check_validation(plan: Plan, cfg: Config) -> Iterator[UserError]:
    """ConfigError if a run validates, and nothing samples."""
    trainer = cfg.trainer
    validates = trainer.val_before_train or trainer.val_only or trainer.test_freq > 0
    given = any(node.spec.gives_data for node in plan.nodes.values())
    if given and validates and not plan.validation:
        yield ConfigError(
            "the run validates, and all its responses come with the dataset: nothing samples. Set "
            f"{VALIDATES}, and score the export by `siirl eval RUN/hf_model "
            "actor_rollout_ref.rollout.name=vllm` (or hf), which samples."
        )
