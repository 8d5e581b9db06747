"""What must hold between nodes: each field has one writer, above its readers; unneeded nodes are pruned."""

from collections.abc import Iterator

from siirl.compiler.resolved_node import ResolvedNode
from siirl.compiler.workflow import Nodes, Workflow
from siirl.config.roles import role_model
from siirl.dag.fields_read import uses_critic
from siirl.errors import ConfigError, DagError, NotSupportedError, UserError
from siirl.spelling import suggest
from siirl.types import FIELDS, LOADED_FIELDS, FieldKey


def check_agents(nodes: Nodes) -> Iterator[UserError]:
    """One rollout and one trainer for each agent."""
    seen: dict[tuple[str, int], ResolvedNode] = {}
    for node in nodes.values():
        if not node.op.unique:
            continue
        place = (node.op.unique, node.agent)
        if place in seen:
            yield DagError(
                f"{seen[place]} and {node} are both the {node.op.unique} of agent {node.agent}: they would "
                "share fields and weights. Remove one. A second agent has a rollout, a reward, an "
                "advantage and a training of its own, all with its agent_group."
            )
        seen[place] = node


def check_kept(kept: Workflow) -> Iterator[UserError]:
    """Something is left to do, and every rollout that is left has a trainer to take weights from.

    In an interaction, an agent of which there is nothing but its rollout is frozen, and needs none.
    """
    if kept.run.trainer.rollout_only:
        if not kept.rollouts:
            yield DagError(
                "trainer.rollout_only is set, but the DAG has no rollout. Add a node with node_type "
                "MODEL_INFERENCE and node_role ROLLOUT, or unset it."
            )
        return
    trained = {node.agent for node in kept.nodes.values() if node.op.trains_policy}
    learning = {node.agent for node in kept.nodes.values() if node.op.trains and node.op.on_scorer}
    serving = any(node.op.is_asked for node in kept.nodes.values())
    if not (trained or learning or serving):
        yield NotSupportedError(
            "not supported yet: a DAG that trains nothing. Add a node with node_type MODEL_TRAIN and "
            "node_role ACTOR; or set trainer.rollout_only=true to sample and score only."
        )
        return
    untrained = {stage.node for stage in kept.stages.values() if not stage.rows}
    for node in kept.nodes.values():
        if node.op.gives_data and node.agent in learning:
            continue
        if node.op.is_rollout and node.agent not in trained and node.id not in untrained:
            frozen = ""
            if node.id in kept.stages:
                frozen = " Or remove its other nodes (reward, ...): the agent is then frozen."
            yield DagError(
                f"{node}: agent {node.agent} has a rollout but no training, so nothing gives it weights. Add "
                f"a node with node_type MODEL_TRAIN, node_role ACTOR, agent_group {node.agent}.{frozen}"
            )


def check_critics(kept: Workflow) -> Iterator[UserError]:
    """An agent whose advantages come from a critic trains one, and no other agent does."""
    yield from _check_shared_critics(kept)
    learning = {node.agent for node in kept.nodes.values() if node.op.trains and node.op.on_critic}
    for node in kept.nodes.values():
        if node.op.credits and uses_critic(node.cfg) and node.agent not in learning:
            yield DagError(
                f"{node} has algorithm.adv_estimator={node.cfg.algorithm.adv_estimator}, but no node trains "
                f"the critic of agent {node.agent}: its values would stay random. Add a node with "
                "node_type MODEL_TRAIN, node_role CRITIC, or set another adv_estimator."
            )
        if node.op.trains and node.op.on_critic and not uses_critic(node.cfg):
            yield DagError(
                f"{node} trains a critic, but algorithm.adv_estimator="
                f"{node.cfg.algorithm.adv_estimator} uses none. "
                "Set algorithm.adv_estimator=gae, or remove the node."
            )


def _check_shared_critics(kept: Workflow) -> Iterator[UserError]:
    """A critic of several agents belongs to one of them, and learns after all of its values are there."""
    critics = [node for node in kept.nodes.values() if node.op.on_critic]
    owners = {node.agent for node in critics if node.model_agent == node.agent and node.op.trains}
    for node in critics:
        if node.cfg.critic.share_instance is not None and node.model_agent not in owners - {node.agent}:
            others = ", ".join(map(str, sorted(owners - {node.agent}))) or "none"
            yield DagError(
                f"{node}: critic.share_instance = {node.model_agent}: agent {node.model_agent} trains no "
                f"critic of its own. Agents that do: {others}."
            )
        for trainer in critics:
            late = trainer.model == node.model and trainer.op.trains and not node.op.trains
            if late and node.id not in kept.graph.above[trainer.id]:
                yield DagError(
                    f"{trainer} and {node} share the critic of agent {node.model_agent}, and nothing says "
                    "which comes first: values must be those of before the update. Let the former depend on "
                    "the latter."
                )


def check_models_of_nodes(kept: Workflow) -> Iterator[UserError]:
    """A node with a frozen model of its own says which."""
    for node in kept.nodes.values():
        role = node.op.role
        if role is None or not role.of_node or role.is_teacher:
            continue
        model = role_model(node.cfg, str(node.op.model))
        if not model.path:
            yield ConfigError(
                f"{node}: {role.model}.path is not set: the node has no model. Add config: "
                f"{{{role.model}.path: DIRECTORY}} to it."
            )
        if model.lora_rank:
            yield ConfigError(
                f"{node}: {role.model}.lora_rank={model.lora_rank}: the model is frozen, and a new adapter "
                "changes nothing. Leave it out; adapters that were trained are merged by `siirl export`."
            )


def check_writers(nodes: Nodes) -> Iterator[UserError]:
    """Each field has one writer, and none is written over the loader's."""
    writers: dict[FieldKey, ResolvedNode] = {}
    for node in nodes.values():
        for key in node.writes:
            if key in writers:
                yield DagError(
                    f"{writers[key]} and {node} both write {key}: readers could not tell which to take. "
                    f"{_one_writer(writers[key], node)}"
                )
            if key.name in LOADED_FIELDS and not node.op.is_rollout:
                yield DagError(f"{node} writes {key}, which comes with the prompts. Choose another name.")
            writers.setdefault(key, node)


def _one_writer(one: ResolvedNode, other: ResolvedNode) -> str:
    """What makes two writers of a field one."""
    if one.op.scores and other.op.scores:
        return (
            "Give each a name by writes: [NAME], and add a node of role REWARD that adds them up: "
            "reads: [NAME, ...] (docs/rewards.md); or remove one."
        )
    if one.op.role is not None and one.op.role.is_reference:
        return (
            "A policy is kept close to one reference: remove one. Models that it learns from are nodes "
            "of node_role: TEACHER (docs/distillation.md)."
        )
    renamed = next((node for node in (other, one) if node.spec.executable_ref is not None), None)
    if renamed is None:
        return "Remove one of the nodes."
    return f"Remove one of the nodes, or give {renamed.id!r} other writes."


def check_readers(kept: Workflow, whole: Workflow) -> Iterator[UserError]:
    """What a kept node reads comes with the prompts or from a node above it; said once for each fix."""
    nodes, ancestors = whole.nodes, whole.graph.above
    writers = {key: node for node in nodes.values() for key in node.writes}
    agents = {node.agent for node in nodes.values()}
    for node in kept.nodes.values():
        fixes: set[str] = set()
        for key in node.reads:
            writer = writers.get(key)
            if key.name in LOADED_FIELDS and key.agent in agents:
                continue
            if key.agent not in agents:
                what = f"but the DAG has no agent {key.agent}: its agents are {sorted(agents)}."
                fix = f"agent {key.agent}"
            elif writer is None:
                fix = _who_could_write(key, node, whole)
                what = f"which no node writes. {fix}"
            elif writer.id not in ancestors[node.id]:
                fix = f"Add {writer.id!r} to the dependencies of {node.id!r}."
                what = f"which {writer} writes, but does not depend on it: it could run first. {fix}"
            else:
                continue
            if fix not in fixes:
                fixes.add(fix)
                yield DagError(f"{node} reads {key}, {what}")


def _who_could_write(key: FieldKey, node: ResolvedNode, workflow: Workflow) -> str:
    nodes = workflow.nodes
    hint = _WRITERS.get(key.name)
    several = len({other.agent for other in nodes.values()}) > 1
    if hint and several and hint.startswith("a node"):
        hint += f", agent_group {key.agent}"
    if key.name == "old_log_prob" and not node.cfg.algorithm.use_kl_in_reward:
        hint = (
            f"{hint}; or train on each batch as one mini-batch (ppo_mini_batch_size = train_batch_size); or "
            "set actor_rollout_ref.actor.recompute_old_log_prob=False"
        )
    if several and key.name == "score" and key.agent in workflow.talking:
        hint = f"{hint}; or let it depend on the reward of an agent it talks with, whose scores it then gets"
    if hint:
        return f"Add {hint}."
    known = [*FIELDS, *(k.name for other in nodes.values() for k in other.writes if k.agent == key.agent)]
    return (
        suggest(key.name, dict.fromkeys(n for n in known if n != key.name)) + " Or add a node that writes it."
    )


_INTERACTION = "an interaction: a rollout node that depends on another agent's, on an environment or on tools"
_WRITERS = (
    dict.fromkeys(("episode_id", "speaker", "turn_id", "env_reward"), _INTERACTION)
    | {
        "baseline_score": (
            "a rollout and a reward node with only_forward_compute: true above the rollout, as in "
            "dag_templates/remax.yaml"
        ),
        "ref_log_prob": "a node with node_type MODEL_TRAIN, node_role REFERENCE",
        "ref_hidden": "a node with node_type MODEL_TRAIN, node_role REFERENCE",
        "old_log_prob": "a node with node_type MODEL_TRAIN, node_role ACTOR, only_forward_compute: true",
        "old_prob_square": "a node with node_type MODEL_TRAIN, node_role ACTOR, only_forward_compute: true",
        "prompt_experts": (
            "a node with node_type MODEL_TRAIN, node_role ACTOR, only_forward_compute: true (R2), or set "
            "actor.router_replay.mode=R3 for the rollout, too"
        ),
        "old_entropy": "a node with node_type MODEL_TRAIN, node_role ACTOR, only_forward_compute: true",
        "score": "a node with node_type COMPUTE, node_role REWARD",
        "advantage": "a node with node_type COMPUTE, node_role ADVANTAGE",
        "value": "a node with node_type MODEL_TRAIN, node_role CRITIC, only_forward_compute: true",
        "return_": "a node with node_type COMPUTE, node_role ADVANTAGE, and set algorithm.adv_estimator=gae",
    }
    | dict.fromkeys(
        (
            "response_ids",
            "response_length",
            "response_mask",
            "rollout_log_prob",
            "finish_reason",
            "weight_version",
        ),
        "a node with node_type MODEL_INFERENCE, node_role ROLLOUT, of this agent",
    )
)
