"""From op names, as the compiler resolves them, to the functions that run them."""

from siirl.dag.plan import NodePlan
from siirl.dag.spec import load_object
from siirl.nodes.actor_train import actor_train
from siirl.nodes.advantage import advantage
from siirl.nodes.baseline import baseline_reward, greedy_rollout
from siirl.nodes.context import Collector, Op
from siirl.nodes.critic import critic_train, values
from siirl.nodes.dynamic_sampling import collect_varied, dynamic_sampling
from siirl.nodes.filter import filter_op, pf_ppo
from siirl.nodes.interaction import interaction, turns
from siirl.nodes.log_prob import old_log_prob, reference_log_prob
from siirl.nodes.replay import replay
from siirl.nodes.reward import custom_op, function_reward
from siirl.nodes.reward_combine import combine_rewards
from siirl.nodes.reward_judge import judge_reward
from siirl.nodes.reward_model import model_reward
from siirl.nodes.rollout import rollout

OPS: dict[str, Op] = {
    "rollout": rollout,
    "interaction": interaction,
    "turns": turns,
    "replay": replay,
    "function_reward": function_reward,
    "model_reward": model_reward,
    "judge_reward": judge_reward,
    "judge_service": judge_reward,
    "combine_rewards": combine_rewards,
    "old_log_prob": old_log_prob,
    "reference_log_prob": reference_log_prob,
    "advantage": advantage,
    "greedy_rollout": greedy_rollout,
    "baseline_reward": baseline_reward,
    "pf_ppo": pf_ppo,
    "dynamic_sampling": dynamic_sampling,
    "actor_train": actor_train,
    "values": values,
    "critic_train": critic_train,
}

FORWARD_OPS = ("old_log_prob", "reference_log_prob", "values")
"""Ops that need the weights of a training engine, but neither its gradients nor its optimizer."""

COLLECTORS: dict[str, Collector] = {"dynamic_sampling": collect_varied}


def find_op(node: NodePlan) -> Op:
    """The function of a node: a built-in op, or the user's "pkg.mod:fn" or "file.py:fn" (else DagError)."""
    if node.executable is None:
        return OPS[node.op]
    function = load_object(node.executable, f"node {node.name!r}: executable_ref")
    return filter_op(function) if node.op == "filter" else custom_op(function)
