"""What must hold where a node trains a reward model, and where nodes score by it."""

from collections.abc import Iterator

from siirl.compiler.resolved_node import ResolvedNode
from siirl.compiler.workflow import Workflow
from siirl.errors import ConfigError, DagError, NotSupportedError, UserError

READ_ALIKE = ("reward_model.model", "reward_model.max_length")
"""What decides in which tokens a reward model reads a conversation."""


def check_reward_training(kept: Workflow) -> Iterator[UserError]:
    """A reward model learns from pairs that something else has ranked, and one agent trains it."""
    trainers = {node.agent: node for node in kept.nodes.values() if node.op.trains and node.op.on_scorer}
    for node in kept.nodes.values():
        if not node.op.on_scorer:
            continue
        if node.op.trains:
            yield from _check_trainer(node, kept)
        elif kept.run.trainer.rollout_only:
            continue  # nothing is trained: it scores by the model of reward_model.model.path
        elif node.shared_scorer is not None and node.shared_scorer not in trainers:
            known = ", ".join(map(str, sorted(trainers))) or "none"
            yield DagError(
                f"{node}: reward_model.share_instance = {node.shared_scorer}: agent {node.shared_scorer} "
                f"trains no reward model. Agents that do: {known}."
            )
        elif node.shared_scorer is not None:
            yield from _check_reads_alike(node, trainers[node.shared_scorer])


def _check_trainer(node: ResolvedNode, kept: Workflow) -> Iterator[UserError]:
    model, samples = node.cfg.reward_model, node.cfg.actor_rollout_ref.rollout.n
    if model.share_instance is not None:
        yield DagError(
            f"{node} trains a reward model, which is that of its own agent. Remove its share_instance, "
            f"and set reward_model.share_instance: {node.agent} at the nodes that score by it."
        )
    if model.judge.name is not None or model.judge.url is not None:
        yield NotSupportedError(
            f"not supported yet: {node}: reward_model.judge with a node that trains the reward model: a "
            "judge writes its grade, and has no score head. Unset reward_model.judge."
        )
    if node.agent in kept.talking:
        yield NotSupportedError(
            f"not supported yet: {node} trains a reward model on an interaction, whose episodes may have any "
            "number of rows. Give it a rollout of an agent by itself."
        )
    if samples != 2:
        yield ConfigError(
            f"{node} with actor_rollout_ref.rollout.n={samples}: a reward model learns from two responses of "
            "a prompt. Set actor_rollout_ref.rollout.n=2, at the rollout of its agent."
        )
    own = [x for x in kept.nodes.values() if x.agent == node.agent and x.op.scores and x.model == node.model]
    for scorer in own:
        if scorer.writes[0].name == "score":
            yield DagError(
                f"{node} trains the model whose scores ({scorer}) say which response is better: it would "
                "learn what it says already. Let another reward write the score, or give the model "
                "responses of the dataset (rollout.name=dataset)."
            )


def _check_reads_alike(node: ResolvedNode, trainer: ResolvedNode) -> Iterator[UserError]:
    """The node encodes conversations by its own configuration, the model learns them by the trainer's."""
    for key in READ_ALIKE:
        if node.value(key) != trainer.value(key):
            yield DagError(
                f"{node} scores by the model of {trainer}, but {key} is not the same at both: it would read "
                "other tokens than those that it learns from. Set it on the command line, for both."
            )
