"""What must hold between rewards: their models and weights, values by name, models in training. Pure."""

from collections.abc import Iterator

from siirl.compiler.resolved_node import ResolvedNode
from siirl.compiler.workflow import Workflow
from siirl.config.reward_weights import RewardWeights
from siirl.config.roles import normalizes_weights
from siirl.dag.ops import score_names
from siirl.errors import ConfigError, DagError, NotSupportedError, UserError, reworded

READ_ALIKE = ("reward_model.model", "reward_model.max_length")
"""What decides in which tokens a reward model reads a conversation."""


def check_reward_models(workflow: Workflow) -> Iterator[UserError]:
    """A node that scores by a model, or trains one, has one, and reward_model.enable, which has a node."""
    scoring = [node for node in workflow.nodes.values() if node.op.by_model or node.op.on_scorer]
    for node in scoring:
        if not node.cfg.reward_model.enable:
            does = "trains a reward model" if node.op.trains else "scores by a model"
            yield DagError(
                f"{node} {does}, but reward_model.enable is False. Set reward_model.enable=True and "
                "reward_model.model.path, or remove the node."
            )
        elif node.op.model is not None and "reward_model.model.path" not in node.cfg.explicit:
            yield ConfigError(
                f"{node}: reward_model.model.path is not set: the node has no model to score by. Name a "
                "directory of a Hugging Face model with a score head (ForSequenceClassification), or of a "
                "judge (reward_model.judge.name); to train, of any language model."
            )
    if workflow.run.reward_model.enable and not scoring:
        yield DagError(
            "reward_model.enable=True, but no node of the DAG scores by a model. Add a node with node_type "
            "MODEL_INFERENCE, node_role REWARD, as in dag_templates/grpo_reward_model.yaml, or set "
            "reward_model.enable=False."
        )


def check_reward_weights(workflow: Workflow) -> Iterator[UserError]:
    """reward_model.weights names rewards that its node reads; without such a node it is an error."""
    combining = [node for node in workflow.nodes.values() if node.op.combines]
    for node in combining:
        reward_model = node.cfg.reward_model
        try:
            RewardWeights(
                reward_model.weights, score_names(node.spec.reads or ()), normalizes_weights(node.cfg)
            )
        except ConfigError as error:
            yield reworded(error, lambda message, node=node: f"{node}: {message}")
    if workflow.run.reward_model.weights and not combining:
        yield DagError(
            "reward_model.weights is set, but no node of the DAG adds up rewards. Add a node with node_type "
            "COMPUTE, node_role REWARD and reads: [the rewards' names], or remove the weights."
        )


def check_named_values(kept: Workflow) -> Iterator[UserError]:
    """Names that a model's score, or a sum of rewards, does not come with. Functions may return any."""
    scorers = {node.agent: node for node in kept.nodes.values() if node.op.scores and _gives_score(node)}
    for node in kept.nodes.values():
        scorer = scorers.get(node.agent)
        known = None if scorer is None else _numbers(scorer)
        if known is None:
            continue
        for key, name in _asked(node):
            if name in known or name.partition("/")[0] in known:
                continue
            has = f"gives {', '.join(known)}" if known else "gives the score of a model alone"
            yield ConfigError(
                f"{node}: {key} names {name!r}, but {scorer} {has}. Name "
                f"{', '.join(dict.fromkeys((*known, 'score')))}, or score by a function that returns it."
            )


def _gives_score(node: ResolvedNode) -> bool:
    return any(key.name == "score" for key in node.writes)


def _numbers(scorer: ResolvedNode) -> tuple[str, ...] | None:
    """What a row has by name of whoever scores it, besides the score; None: whatever the function returns."""
    if scorer.op.by_model:
        return ()
    return score_names(scorer.spec.reads or ()) if scorer.op.combines else None


def _asked(node: ResolvedNode) -> Iterator[tuple[str, str]]:
    """The keys that name numbers for a node, and those numbers."""
    algorithm = node.cfg.algorithm
    metric = algorithm.filter_groups.metric
    if node.op.repeats and metric not in ("acc", "score"):
        yield "algorithm.filter_groups.metric", metric
    if node.op.credits and algorithm.estimator.compares_parts:
        yield from (("algorithm.gdpo_rewards", name) for name in algorithm.gdpo_rewards if name != "score")


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
