"""What `siirl plan` says of credit, tools and turns of training, for its tables and its picture. Pure."""

from collections.abc import Mapping
from pathlib import Path

from siirl.compiler.interactions.stages import assistant_turns
from siirl.compiler.plan import InteractionPlan, Plan
from siirl.config import Config
from siirl.config.algorithm_table import GROUPED
from siirl.types import FieldKey

Configs = Mapping[str, Config]


def speakers_of(plan: Plan, policy: int) -> list[int]:
    """The agents that speak with a policy in an interaction; none if there is none."""
    talks = plan.interactions.values()
    return [stage.agent for talk in talks for stage in talk.speaking if stage.policy == policy]


def credit_rows(plan: Plan, configs: Configs) -> list[list[str]]:
    """A table: what each advantage node of an interaction adds up, and what it compares."""
    rows = [["node", "estimator", "reward", "compared by", "besides"]]
    for name, node in plan.nodes.items():
        if _has_credit(plan, name):
            algorithm = configs[name].algorithm
            credit = algorithm.credit
            grouped = algorithm.adv_estimator in GROUPED
            besides = [f"turn_gamma {credit.turn_gamma:g}"] if "turn" in credit.group_by and grouped else []
            besides += ["each agent's advantages normalised"] if credit.normalize == "agent" else []
            besides += [f"equal weight of each {credit.equal_weight}"] * (credit.equal_weight != "none")
            group = ", ".join(credit.group_by) if grouped else ""
            reward = " + ".join(_terms(plan, name, node.agent, configs[name]))
            rows.append([name, algorithm.adv_estimator, reward, group, ", ".join(besides)])
    return rows


def credit_words(plan: Plan, name: str, configs: Configs) -> str:
    """The same in a few words; empty for nodes without credit."""
    if not _has_credit(plan, name) or name not in configs:
        return ""
    algorithm = configs[name].algorithm
    weights = f"own {algorithm.credit.own:g}, team {algorithm.credit.team:g}"
    if algorithm.adv_estimator not in GROUPED:
        return weights
    return f"{weights}, by {', '.join(key.rpartition(':')[2] for key in algorithm.credit.group_by)}"


def training_turns(plan: Plan, configs: Configs) -> list[str]:
    """A line if policies are trained by turns."""
    trainers = [name for name, node in plan.nodes.items() if node.spec.trains_policy and node.options]
    if not trainers:
        return []
    trainers.sort(key=lambda name: plan.nodes[name].options["place"])
    cycle = configs[trainers[0]].actor_rollout_ref.rollout.agent.train_cycle
    steps = f"{cycle} step{'s' * (cycle != 1)}"
    return [f"{', '.join(trainers)} train by turns of {steps} (rollout.agent.train_cycle)"]


def turn_words(plan: Plan, name: str, configs: Configs) -> str:
    """Whether a node trains by turns, in a few words."""
    node = plan.nodes[name]
    if not node.spec.trains_policy or not node.options or name not in configs:
        return ""
    cycle = configs[name].actor_rollout_ref.rollout.agent.train_cycle
    return f"turns of {cycle} step{'s' * (cycle != 1)}"


def tool_words(name: str, configs: Configs) -> str:
    """The file of an agent's tools, and how often it speaks in a row; empty without tools."""
    if name not in configs:
        return ""
    multi_turn = configs[name].actor_rollout_ref.rollout.multi_turn
    if not multi_turn.enable:
        return ""
    path = multi_turn.tool_config_path
    turns = assistant_turns(multi_turn)
    return f"{Path(path).name if path else 'none'}, {turns} turn{'s' * (turns != 1)}"


def _has_credit(plan: Plan, name: str) -> bool:
    node = plan.nodes[name]
    return node.spec.credits and bool(speakers_of(plan, node.agent))


def _terms(plan: Plan, name: str, agent: int, cfg: Config) -> list[str]:
    """What the reward of a row is the sum of, as siirl/nodes/interaction_credit.py adds it up."""
    run, credit = plan.run_of(name), cfg.algorithm.credit
    owns = FieldKey(agent, "score") in run.reads
    terms = [f"{credit.own:g} x own score"] if owns else []
    reads = {name: {key.agent for key, _ in run.joins if key.name == name} for name in ("score", "value")}
    team = credit.team if owns or credit.team or not reads["score"] else 1.0
    counted = ([agent] if owns else []) + sorted(reads["score"] - reads["value"])
    among = {speaker for policy in (agent, *counted) for speaker in speakers_of(plan, policy)}
    if team and counted and len(among) > 1:
        terms.append(f"{team:g} x mean score of the others (of agents {_listed(among)})")
    if team and reads["value"]:
        terms.append(f"{team:g} x rewards of agents {_listed(reads['value'])}, at their turns")
    talk = next(talk for talk in plan.interactions.values() if _speaks(talk, agent))
    if credit.turn and any(stage.rewards_with_env for stage in talk.acting):
        terms.append(f"{credit.turn:g} x the environment's")
    if credit.turn and talk.program is not None:
        terms.append(f"{credit.turn:g} x the program's, if it gives one")
    return terms


def _listed(agents: set[int]) -> str:
    return ", ".join(map(str, sorted(agents)))


def _speaks(talk: InteractionPlan, policy: int) -> bool:
    return any(stage.policy == policy for stage in talk.speaking)
