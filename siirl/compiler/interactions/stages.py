"""The nodes of an interaction, one by one: what each says of its turns, checked, as a stage. Pure."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from siirl.compiler.interactions.at_once import starts_of
from siirl.compiler.interactions.branching import branches_of
from siirl.compiler.plan import AgentStage, Environment, EnvStage
from siirl.compiler.resolved_node import ResolvedNode
from siirl.compiler.workflow import Nodes, Workflow
from siirl.config.rollout import ASSISTANT_TURNS, MultiTurnConfig
from siirl.dag.graph import Graph
from siirl.errors import DagError, NotSupportedError
from siirl.spelling import suggest
from siirl.user_code.signatures import Call
from siirl.user_code.source import (
    check_environment,
    check_reference,
    import_problem,
    may_define,
    source_of,
    top_functions,
)

LOOP_KEYS = ("to", "max_turns", "until")
AGENT_KEYS = ("process_path", "pre_process_kwargs", "post_process_kwargs", "route")
ENV_SEEDS = ("sample", "prompt")
USES = ("obs_with_env", "rewards_with_env")
ENV_KEYS = ("env_path", "env_kwargs", "env_seed", "deadline_s", "max_concurrent", *USES)
ENV_DEADLINE_S = 60.0
ENV_MAX_CONCURRENT = 64
PROCESS = {"pre_process": ("messages", "episode"), "post_process": ("text", "episode")}
"""Functions around a turn, and what they are called with."""


def make_stage(
    node: ResolvedNode,
    members: list[ResolvedNode],
    workflow: Workflow,
    beside: Mapping[str, tuple[str, ...]],
) -> AgentStage | EnvStage:
    """The stage of a node; members: the nodes of its interaction, in order. DagError if it cannot be one.

    beside: of each member, those that may run while it does.
    """
    if node.op.is_rollout and node.op.model is None:
        name = node.cfg.actor_rollout_ref.rollout.name
        raise NotSupportedError(f"not supported yet: {node}: rollout.name={name} in an interaction.")
    order, graph = [member.id for member in members], workflow.graph
    is_env = node.op.is_environment
    options = dict(node.spec.agent_options or {})
    _check_keys(node, "agent_options", options, ("route",) if is_env else AGENT_KEYS)
    route = options.pop("route", None)
    children = tuple(child for child in graph.children[node.id] if child in order)
    back_to, max_turns, until = _loop(node, order, graph)
    for name, reference in (("until", until), ("route", route)):
        if reference is not None:
            check_reference(reference, f"{node}: {name}", Call(("episode",)))
    following = () if route is not None and len(children) > 1 else children
    where = (node.id, node.agent, following, back_to, max_turns, until, route)
    if is_env:
        uses = {key: node.options.get(key, True) for key in USES}
        env = environment_of(node, _speaking_together(members, graph, beside))
        return EnvStage(*where, **uses, env=env, beside=beside[node.id])
    _check_tools(node)
    share = workflow.shared_policy(node)
    rows = share is None and not _is_frozen(node, workflow.nodes)
    policy = node.agent if share is None else share
    more = _process_options(node, options) | {"beside": beside[node.id], "branches": branches_of(node)}
    return AgentStage(*where, policy, rows, **more)


def rollout_cfg(node: ResolvedNode) -> Any:
    """The rollout group of a node's configuration."""
    return node.cfg.actor_rollout_ref.rollout


def assistant_turns(multi_turn: MultiTurnConfig) -> int:
    """How often an agent speaks at most, until it is another's turn: again after each answer of tools."""
    if not multi_turn.enable:
        return 1
    users = multi_turn.max_user_turns
    bounds = [multi_turn.max_assistant_turns, None if users is None else users + 1]
    return min((bound for bound in bounds if bound is not None), default=ASSISTANT_TURNS)


def is_member(node: ResolvedNode) -> bool:
    """Whether a node can be in an interaction."""
    return node.op.is_environment or node.op.is_rollout


def is_conversation(node: ResolvedNode) -> bool:
    """Whether a rollout that is connected to no other is an interaction: it has turns, or code around it."""
    if not node.op.is_rollout:
        return False
    if node.cfg.actor_rollout_ref.serve.is_played:
        return True
    return bool(node.spec.loop or node.spec.agent_options or rollout_cfg(node).multi_turn.enable)


def _is_frozen(node: ResolvedNode, nodes: Nodes) -> bool:
    """Whether the agent is never trained: the DAG has nothing for it but its rollout."""
    return not any(other.agent == node.agent and not is_member(other) for other in nodes.values())


def _check_tools(node: ResolvedNode) -> None:
    """DagError unless the file of its tools and its parser are there; the run loads them."""
    multi_turn = rollout_cfg(node).multi_turn
    if not multi_turn.enable:
        return
    if ":" in multi_turn.format:
        check_reference(multi_turn.format, f"{node}: rollout.multi_turn.format", Call(("text",)))
    path = multi_turn.tool_config_path
    if path is not None and not Path(path).expanduser().is_file():
        raise DagError(
            f"{node}: rollout.multi_turn.tool_config_path = {path!r}: there is no such file. Correct "
            "the path, or leave it out: then there are no tools."
        )


def _check_keys(node: ResolvedNode, key: str, given: dict[str, Any], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            raise DagError(f"{node}: {key} has the unknown key {name!r}. {suggest(name, known)}")


def loop_targets(node: ResolvedNode) -> list[Any]:
    """The nodes that a loop names: one, or several."""
    target = (node.spec.loop or {}).get("to", [])
    return target if isinstance(target, list) else [target]


def _loop(node: ResolvedNode, order: list[str], graph: Graph) -> tuple[tuple[str, ...], int, str | None]:
    """(where an episode goes back to, most visits of the node, reference of until)."""
    loop = node.spec.loop
    if loop is None:
        return (), 1, None
    _check_keys(node, "loop", loop, LOOP_KEYS)
    turns = loop.get("max_turns")
    if not isinstance(turns, int) or isinstance(turns, bool) or turns < 1:
        raise DagError(
            f"{node}: loop.max_turns = {turns!r}: without a whole number of at least 1 an episode might "
            "never end. Set how often the node may run in one episode, e.g. loop: {max_turns: 4}."
        )
    targets = loop_targets(node) or starts_of(order, graph)
    for target in targets:
        if target not in order[: order.index(node.id) + 1]:
            raise DagError(
                f"{node}: loop.to = {target!r} is no node of its interaction up to it "
                f"({', '.join(order[: order.index(node.id) + 1])}): a loop goes back. "
                f"{suggest(str(target), order)}"
            )
    return tuple(targets), turns, loop.get("until")


def _process_options(node: ResolvedNode, options: dict[str, Any]) -> dict[str, Any]:
    """process_path and the arguments of its functions: of agent_options, else of rollout.agent."""
    agent = rollout_cfg(node).agent
    path = options.get("process_path", agent.process_path)
    kwargs = {
        "pre_process_kwargs": options.get("pre_process_kwargs", agent.pre_process_kwargs),
        "post_process_kwargs": options.get("post_process_kwargs", agent.post_process_kwargs),
    }
    for name, value in kwargs.items():
        if not isinstance(value, dict):
            raise DagError(f"{node}: {name} = {value!r} is no mapping of arguments. Write {{name: value}}.")
        if path is None and value:
            raise DagError(f"{node}: {name} are arguments of no function. Set process_path.")
    if path is None:
        return {}
    found = _process_functions(path, f"{node}: process_path = {path!r}")
    for name in PROCESS:
        key = f"{name}_kwargs"
        if name in found:
            check_reference(f"{path}:{name}", f"{node}: {name}", process_call(name, kwargs[key]))
        elif kwargs[key]:
            raise DagError(f"{node}: {key} are arguments of no function: {path} has no {name}. Add it.")
    return {"process_path": path, **{f"{name}_kwargs": kwargs[f"{name}_kwargs"] for name in found}}


def process_call(name: str, kwargs: Mapping[str, Any]) -> Call:
    """How pre_process or post_process is called."""
    return Call(PROCESS[name], tuple(map(str, kwargs)), f"{name}_kwargs")


def _process_functions(path: Any, who: str) -> list[str]:
    """Which functions around a turn the file or module has. DagError if it has none."""
    if not isinstance(path, str):
        raise DagError(f"{who} is no text. Write the path of a file.py, or a module pkg.mod.")
    try:
        tree = source_of(path)
    except (ImportError, OSError, SyntaxError) as error:
        raise DagError(f"{who}: {import_problem(path, error)}") from error
    found = list(PROCESS)
    if tree is not None:
        found = [name for name in PROCESS if name in top_functions(tree) or may_define(tree, name)]
    if not found:
        raise DagError(f"{who}: it defines neither pre_process nor post_process. Define one of them.")
    return found


def _speaking_together(
    members: list[ResolvedNode], graph: Graph, beside: Mapping[str, tuple[str, ...]]
) -> tuple[str, ...]:
    """Two rollouts of an interaction that both speak before its environment steps: one follows the other, or
    they do so at once."""
    rollouts = {node.id: node for node in members if not node.op.is_environment}
    pairs = ((node, other) for node in rollouts for other in (*graph.children[node], *beside[node]))
    return next((pair for pair in pairs if pair[1] in rollouts), ())


def environment_of(node: ResolvedNode, several: tuple[str, ...] = ()) -> Environment | None:
    """Which environment a node names, if it does; DagError for whatever is wrong with it.

    several: nodes that speak before it steps, if that is known.
    """
    _check_keys(node, "config", node.options, ENV_KEYS)
    path, kwargs = node.options.get("env_path"), node.options.get("env_kwargs", {})
    path = path[0] if isinstance(path, list) and len(path) == 1 else path
    if isinstance(path, list) and len(path) > 1:
        raise DagError(
            f"{node}: env_path = {path} names {len(path)} environments: an episode has one. Name one, which "
            "may hold others."
        )
    if not isinstance(kwargs, dict):
        raise DagError(f"{node}: env_kwargs = {kwargs!r} is no mapping of arguments. Write {{name: value}}.")
    if path is not None:
        check_environment(path, f"{node}: env_path", kwargs, several)
    deadline_s = node.options.get("deadline_s", ENV_DEADLINE_S)
    if isinstance(deadline_s, bool) or not isinstance(deadline_s, int | float) or deadline_s <= 0:
        raise DagError(f"{node}: deadline_s = {deadline_s!r} is no number of seconds above 0. Correct it.")
    places = node.options.get("max_concurrent", ENV_MAX_CONCURRENT)
    if isinstance(places, bool) or not isinstance(places, int) or places < 1:
        raise DagError(
            f"{node}: max_concurrent = {places!r} is no whole number of at least 1: so many environments run "
            "at once on each rank. Correct it."
        )
    seed = node.options.get("env_seed", "sample")
    if seed not in ENV_SEEDS:
        raise DagError(
            f"{node}: env_seed = {seed!r} is neither 'sample' (each episode draws an instance of its own) "
            "nor 'prompt' (all episodes of a prompt play the same one). Set one of them."
        )
    for key in USES:
        if not isinstance(value := node.options.get(key, True), bool):
            raise DagError(f"{node}: {key} = {value!r} is neither true nor false. Correct it.")
    return None if path is None else Environment(str(path), kwargs, seed, float(deadline_s), places)
