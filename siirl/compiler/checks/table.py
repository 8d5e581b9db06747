"""All checks of a compiled workflow, in the order in which they are told; each is beside what it checks.

"ops": of the nodes with their ops. "interactions": of them with what follows from interactions (`talking`).
"nodes": of the nodes that are left when idle ones are pruned (`kept`), and of all of them (`whole`).
"engines", "places": of the nodes, their models and where their rows lie.
"plan": of the plan, and the configuration of each of its nodes (`configs`).
Those of a node's model stand with its backend (`siirl/compiler/backends`), of what it is made of in
`model_checks.py` and `megatron_checks.py`.
"""

from collections.abc import Iterator

from siirl.compiler.agent_steps import check_windows
from siirl.compiler.checks.engine_abilities import (
    check_images,
    check_kept_kv,
    check_log_prob_bound,
    check_quantized,
    check_router_replay,
    check_weights_in_place,
)
from siirl.compiler.checks.fields import (
    check_agents,
    check_critics,
    check_kept,
    check_models_of_nodes,
    check_readers,
    check_writers,
)
from siirl.compiler.checks.given_responses import check_given, check_order, check_pairs, check_validation
from siirl.compiler.checks.lag_checks import check_lag, check_loaders
from siirl.compiler.checks.reward_checks import (
    check_named_values,
    check_reward_models,
    check_reward_training,
    check_reward_weights,
)
from siirl.compiler.checks.sampling_rounds import check_resampling, check_rounds, check_sampling
from siirl.compiler.interactions.find import check_agents_of
from siirl.compiler.memory.awake_engines import check_awake
from siirl.compiler.profiled_nodes import check_profiled
from siirl.compiler.resolved_node import check_node_config
from siirl.compiler.teachers import check_teachers
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
    Check("ops", ("nodes",), check_agents),
    Check("interactions", ("nodes",), check_writers),
    Check("interactions", ("talking",), check_agents_of),
    Check("nodes", KEPT, check_kept),
    Check("nodes", KEPT, check_critics),
    Check("nodes", KEPT, check_sampling),
    Check("nodes", KEPT, check_resampling),
    Check("nodes", KEPT, check_named_values),
    Check("nodes", KEPT, check_lag),
    Check("nodes", KEPT, check_given),
    Check("nodes", KEPT, check_pairs),
    Check("nodes", ("kept", "whole"), check_teachers),
    Check("nodes", KEPT, check_windows),
    Check("nodes", KEPT, check_images),
    Check("nodes", KEPT, check_router_replay),
    Check("nodes", KEPT, check_log_prob_bound),
    Check("nodes", KEPT, check_quantized),
    Check("nodes", KEPT, check_models_of_nodes),
    Check("nodes", WHOLE, check_reward_models),
    Check("nodes", KEPT, check_reward_training),
    Check("nodes", WHOLE, check_reward_weights),
    Check("nodes", KEPT, check_profiled),
    Check("nodes", ("kept", "whole"), check_readers),
    Check("nodes", KEPT, check_node_configs),
    Check("engines", ("interactions", "models", "configs"), check_awake),
    Check("places", ("nodes", "graph", "places"), check_rounds),
    Check("plan", ("plan",), check_loaders),
    Check("plan", ("plan",), check_order),
    Check("plan", ("plan", "run"), check_validation),
    Check("plan", ("plan", "configs"), check_kept_kv),
    Check("plan", ("plan", "configs"), check_weights_in_place),
)
