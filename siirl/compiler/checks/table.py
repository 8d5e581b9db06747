"""All checks of a compiled workflow, in the order in which they are told; each is beside what it checks.

"ops": of the nodes with their ops. "interactions": of them with what follows from interactions (`talking`).
"nodes": of the nodes that are left when idle ones are pruned (`kept`), of all of them (`whole`), and the
number of ranks (`world`).
"engines", "places": of the nodes, their models and where their rows lie.
"plan": of the plan, and the configuration of each of its nodes (`configs`).
Those of a node's model stand with its backend (`siirl/compiler/backends`), of what it is made of in
`model_checks.py` and `megatron_checks.py`.
"""

from collections.abc import Iterator

from siirl.compiler import agent_steps, profiled_nodes, teachers
from siirl.compiler.checks import (
    dataset_responses,
    engine_abilities,
    fields,
    reward_checks,
    sampling_rounds,
    service_checks,
    staleness_checks,
)
from siirl.compiler.interactions import branching, opponents
from siirl.compiler.interactions.find import check_agents_of
from siirl.compiler.memory.resident_engines import check_resident
from siirl.compiler.resolved_node import check_node_config
from siirl.compiler.workflow import Workflow
from siirl.config.checks import contradictions
from siirl.errors import UserError
from siirl.findings import Check

KEPT, WHOLE = ("kept",), ("whole",)


def check_node_configs(kept: Workflow) -> Iterator[UserError]:
    """Contradictions in the configurations of nodes that are not in the run's own."""
    of_run = {str(problem) for problem in contradictions(kept.run)}
    for node in kept.nodes.values():
        yield from check_node_config(node, of_run)


CHECKS = (
    Check("ops", ("nodes",), fields.check_agents),
    Check("interactions", ("nodes",), fields.check_writers),
    Check("interactions", ("talking",), check_agents_of),
    Check("nodes", KEPT, fields.check_kept),
    Check("nodes", KEPT, fields.check_critics),
    Check("nodes", ("kept", "world"), service_checks.check_asked),
    Check("nodes", KEPT, sampling_rounds.check_sampling),
    Check("nodes", KEPT, sampling_rounds.check_resampling),
    Check("nodes", KEPT, reward_checks.check_named_values),
    Check("nodes", KEPT, staleness_checks.check_staleness),
    Check("nodes", KEPT, branching.check_branches),
    Check("nodes", KEPT, opponents.check_pools),
    Check("nodes", KEPT, dataset_responses.check_given),
    Check("nodes", KEPT, dataset_responses.check_pairs),
    Check("nodes", ("kept", "whole"), teachers.check_teachers),
    Check("nodes", KEPT, agent_steps.check_windows),
    Check("nodes", KEPT, engine_abilities.check_images),
    Check("nodes", KEPT, engine_abilities.check_router_replay),
    Check("nodes", KEPT, engine_abilities.check_log_prob_bound),
    Check("nodes", KEPT, engine_abilities.check_quantized),
    Check("nodes", KEPT, fields.check_models_of_nodes),
    Check("nodes", WHOLE, reward_checks.check_reward_models),
    Check("nodes", KEPT, reward_checks.check_reward_training),
    Check("nodes", WHOLE, reward_checks.check_reward_weights),
    Check("nodes", KEPT, profiled_nodes.check_profiled),
    Check("nodes", ("kept", "whole"), fields.check_readers),
    Check("nodes", KEPT, check_node_configs),
    Check("engines", ("interactions", "models", "configs"), check_resident),
    Check("places", ("nodes", "graph", "places"), sampling_rounds.check_rounds),
    Check("plan", ("plan",), staleness_checks.check_loaders),
    Check("plan", ("plan",), opponents.check_places),
    Check("plan", ("plan",), dataset_responses.check_order),
    Check("plan", ("plan", "run"), dataset_responses.check_validation),
    Check("plan", ("plan", "configs"), engine_abilities.check_weights_in_place),
)
