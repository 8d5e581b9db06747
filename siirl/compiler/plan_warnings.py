"""What works in a plan but is hardly meant, and what a reader of the DAG file might not expect. Pure."""

from collections.abc import Iterator, Mapping

from siirl.compiler.backends import backend_of
from siirl.compiler.memory.estimate import longest_row
from siirl.compiler.plan import InteractionPlan, ModelPlan, Plan
from siirl.compiler.profiled_nodes import profile_warnings
from siirl.compiler.resolved_node import AGENT_WIDE
from siirl.config import Config
from siirl.config.effects import effect_warnings, why_no_effect
from siirl.config.resolve import get
from siirl.config.roles import ROLES
from siirl.config.root import all_keys
from siirl.config.values import show
from siirl.user_code.returned_reward import returns_given

SHORT_TOKENS = 4096
"""Of a sequence: matrix products with fewer tokens leave most of a device idle."""


def plan_warnings(cfg: Config, plan: Plan, node_cfgs: Mapping[str, Config]) -> list[str]:
    """One line for each key without effect, of the run or of a node, and for what works badly.

    node_cfgs: the configuration of each node.
    """
    lines = [*effect_warnings(cfg, node_cfgs.values()), *_node_warnings(plan, node_cfgs)]
    for model in plan.models.values():
        lines += backend_of(model).advice(model, node_cfgs[model.node])
        lines += _single_sequences(model, node_cfgs[model.node])
    lines += profile_warnings(cfg, plan)
    lines += _returned_again(plan, node_cfgs)
    return list(dict.fromkeys(lines))


def _single_sequences(model: ModelPlan, cfg: Config) -> Iterator[str]:
    """Micro-batches of one sequence that somebody asked for, where several fit into the time of one."""
    longest, role = longest_row(cfg, model.role), ROLES[model.role]
    if model.generates or longest >= SHORT_TOKENS:
        return
    found = (role.forward, role.train if model.trains else None)
    for keys in {keys.max_rows: keys for keys in found if keys}.values():
        alone = keys.max_rows in cfg.explicit and get(cfg, keys.max_rows) == 1
        if alone and not get(cfg, keys.dynamic):
            yield (
                f"{keys.max_rows}=1: each sequence, of at most {longest} tokens, is computed by itself, "
                f"often several times slower than many at once. Leave it out, and {keys.max_tokens} is "
                "chosen from the memory that there is."
            )


def _returned_again(plan: Plan, node_cfgs: Mapping[str, Config]) -> Iterator[str]:
    """Reward functions of the user's that return what credit adds besides, or what nobody gives."""
    for talk in plan.interactions.values():
        agents = {stage.policy for stage in talk.speaking}
        for name, node in plan.nodes.items():
            credit, user = node_cfgs[name].algorithm.credit, node_cfgs[name].custom_reward_function
            if "scorer" not in node.needs or node.agent not in agents or user.path is None:
                continue
            if talk.gives_rewards and not (credit.turn and credit.own):
                continue
            for function in user.weights or [user.name]:
                if not returns_given(user.path, function):
                    continue
                yield (
                    f"node {name!r}: {function} of {user.path} returns what the environment gave "
                    f"(message['reward'] of the conversation), {_why_not_meant(talk, credit.turn)}"
                )


def _why_not_meant(talk: InteractionPlan, credit_turn: float) -> str:
    if talk.gives_rewards:
        return (
            f"and algorithm.credit.turn={credit_turn:g} adds that by itself: it counts twice. Return what "
            "the environment does not give, or set algorithm.credit.turn=0."
        )
    if not talk.acting:
        return "which is always 0: the conversation has no environment. Return a score of the answer."
    nodes = ", ".join(repr(stage.node) for stage in talk.acting)
    return (
        f"which is always 0: rewards_with_env=false of {nodes}. Set rewards_with_env=true, and "
        "algorithm.credit.turn adds the rewards by itself; or return a score of the answer."
    )


def _node_warnings(plan: Plan, node_cfgs: Mapping[str, Config]) -> Iterator[str]:
    """Keys in the config of nodes that change nothing there; an agent's keys are named at its rollout."""
    speaking = {stage.node for inter in plan.interactions.values() for stage in inter.stages}
    rollouts = {model.node for model in plan.models.values() if model.is_rollout} | speaking
    at_rollout = {(plan.nodes[node].agent, key) for node in rollouts for key in plan.nodes[node].overrides}
    chosen = {
        (node, key)
        for choice in plan.choices
        for node in (plan.models[choice.model].node, *plan.models[choice.model].nodes)
        for key in choice.keys
    }
    for name, node in plan.nodes.items():
        for key in node.overrides:
            if (name, key) in chosen:
                continue
            repeated = key.startswith(AGENT_WIDE) and (node.agent, key) in at_rollout and name not in rollouts
            if repeated or key not in all_keys():
                continue
            value, known = get(node_cfgs[name], key), all_keys()[key]
            if value != known.default and (why := why_no_effect(node_cfgs[name], key)):
                yield f"node {name!r}: {key}={show(known, value)} has no effect: {why}."


def plan_notes(plan: Plan) -> list[str]:
    """Which agents learn from rewards of others, and which are never trained, as the DAG file implies."""
    trained = {node.agent for node in plan.nodes.values() if node.spec.trains_policy}
    scored = {
        key.agent for run in plan.instructions for key in getattr(run, "writes", ()) if key.name == "score"
    }
    notes = []
    for stage in (stage for inter in plan.interactions.values() for stage in inter.speaking):
        if stage.policy != stage.agent:
            continue
        who = f"agent {stage.agent} ({stage.node})"
        if stage.agent in trained - scored:
            from_others = ", ".join(map(str, _scores_of(plan, stage.agent)))
            whose = f"the scores of agent {from_others}" if from_others else "what its environment gives"
            notes.append(f"{who} has no reward node of its own: it learns from {whose}")
        elif trained and stage.agent not in trained and _has_weights(plan, stage.agent):
            others = " or ".join(str(agent) for agent in sorted(trained))
            notes.append(
                f"{who} speaks and is not trained: it is frozen. To let it speak with another's policy, "
                f"set rollout.agent.share_instance ({others}) in its config; to train it, add a reward, an "
                "advantage and an ACTOR node"
            )
    return notes


def _scores_of(plan: Plan, agent: int) -> list[int]:
    """The agents whose scores the advantages of an agent are made of."""
    names = [name for name, node in plan.nodes.items() if node.agent == agent and node.spec.credits]
    joined = {key.agent for name in names for key, _ in plan.run_of(name).joins if key.name == "score"}
    return sorted(joined - {agent})


def _has_weights(plan: Plan, agent: int) -> bool:
    """Whether a rollout engine of this run speaks for the agent, rather than a service."""
    model = plan.models.get(f"agent_{agent}.rollout")
    return model is not None and backend_of(model).weights
