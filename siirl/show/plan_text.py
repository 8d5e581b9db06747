"""`siirl plan` as text: who runs where, which rows move, batch arithmetic, memory, and what is left out."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from siirl.compiler.backends import backend_of
from siirl.compiler.choices import choice_lines
from siirl.compiler.instructions import ROUTING
from siirl.compiler.memory.estimate import read_shape
from siirl.compiler.memory.resident_engines import resident_shares, shares_text
from siirl.compiler.plan import ALL, Branches, InteractionPlan, LinkPlan, ModelPlan, Plan, PoolPlan, StagePlan
from siirl.compiler.plan_instructions import (
    Collect,
    Free,
    Load,
    Repeat,
    Reshard,
    Run,
    Serve,
    SyncWeights,
    Until,
)
from siirl.config import Config
from siirl.config.roles import role_group
from siirl.parallel.pipeline_layers import split_layers
from siirl.parallel.placement import Ranks, format_ranks
from siirl.show.batch_text import batch_lines, count_of
from siirl.show.credit_text import Configs, credit_rows, tool_words, training_turns
from siirl.show.memory_text import memory_table
from siirl.spelling import aligned
from siirl.types import Layout

_MOST_GROUPS = 16
_MOST_LINES = 64  # lines of coordinates of a model


def report(plan: Plan, configs: dict[str, Config], device_gib: float | None = None) -> str:
    """The whole report; configs: the resolved configuration of each kept node.

    device_gib: what a device has, if trainer.device_memory_gib does not say.
    """
    sections = [
        ("nodes by rank", _nodes_by_rank(plan)),
        ("conversations", conversations(plan, configs)),
        ("credit", _credit(plan, configs)),
        ("models", _models(plan)),
        ("batches", batch_lines(plan, configs)),
        ("a step", _instructions(plan)),
        ("process groups", _groups(plan)),
        (f"chosen for {plan.chosen_for}, as nobody set it", choice_lines(plan)),
        ("memory per rank (estimate)", _memory(plan, configs, device_gib)),
        ("skipped", [f"{node}: {why}" for node, why in plan.pruned.items()]),
    ]
    head = f"plan of DAG {plan.dag_id!r} on {count_of(plan.world_size, 'rank')}"
    body = ["\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections if lines]
    return "\n\n".join([head, *body]) + "\n"


def model_setup(plan: Plan, configs: dict[str, Config]) -> str:
    """A line for each model: backend, ranks and parallel sizes, and how a pipeline cuts its layers."""
    return "\n".join(
        f"{model.name}: {model.backend} on {count_of(len(model.ranks), 'rank')} "
        f"({format_ranks(model.ranks)}), {sizes(model, every=backend_of(model).five_sizes)}"
        f"{_cut(model, configs[model.node])}"
        for model in plan.models.values()
    )


def _cut(model: ModelPlan, cfg: Config) -> str:
    """How the vocabulary is padded and the layers are cut, if that is to be said and the model is known."""
    if not backend_of(model).five_sizes:
        return ""
    shape = read_shape(cfg, model.role)
    if isinstance(shape, str):
        return ""
    padded = -(-shape.vocabulary // model.dims.tp) * model.dims.tp
    vocabulary = (
        f", vocabulary padded from {shape.vocabulary} to {padded}" if padded > shape.vocabulary else ""
    )
    if model.dims.pp == 1:
        return vocabulary
    options = role_group(cfg, model.role).megatron.override_transformer_config
    counts = [sum(chunks) for chunks in split_layers(shape.layers, model.dims.pp, model.dims.vpp, options)]
    runs = [f"{len(list(same))} x {count}" for count, same in itertools.groupby(counts)]
    return f"{vocabulary}, layers on each pipeline rank: {', '.join(runs)}"


def rank_classes(plan: Plan) -> list[tuple[Ranks, dict[str, str]]]:
    """Ranks that do the same, in the order of their first: node -> "x" (they run it), "serves", or both."""
    marks: dict[int, dict[str, list[str]]] = {rank: {} for rank in range(plan.world_size)}
    for node, ranks in node_ranks(plan).items():
        for rank in ranks:
            marks[rank].setdefault(node, []).append("x")
    for interaction in plan.interactions.values():
        for stage in interaction.speaking:
            for head in _asked(plan, interaction, stage.model):
                marks[head].setdefault(stage.node, []).append("serves")
    classes: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for rank, found in marks.items():
        key = tuple((node, ", ".join(found[node])) for node in plan.nodes if node in found)
        classes.setdefault(key, []).append(rank)
    return [(tuple(ranks), dict(found)) for found, ranks in classes.items()]


def node_ranks(plan: Plan) -> dict[str, Ranks]:
    """Node -> the ranks that run it, in execution order; those of an interaction that have no Run are played
    by its entry's.
    """
    ran = {ins.node: ins.ranks for ins in plan.instructions if isinstance(ins, Run)}
    played = {stage.node: ran[entry] for entry, talk in plan.interactions.items() for stage in talk.stages}
    return {node: (played | ran)[node] for node in plan.nodes}


def home_ranks(plan: Plan) -> dict[str, Ranks]:
    """As node_ranks, but an agent of an interaction is where its engines are."""
    homes = node_ranks(plan)
    for interaction in plan.interactions.values():
        for stage in interaction.speaking:
            homes[stage.node] = plan.models[stage.model].ranks
    return homes


def conversations(plan: Plan, configs: Configs) -> list[str]:
    """For each interaction a table of its nodes: who acts there, by what, and where an episode goes then."""
    lines = []
    for talk in plan.interactions.values():
        rows = [["", "node", "who", "by", "tools", "then"]]
        for position, stage in enumerate(talk.stages, 1):
            tools = tool_words(stage.node, configs) if stage in talk.speaking else ""
            then = goes_to(stage) if talk.program is None else "where the program says"
            rows.append([str(position), stage.node, stage.who, stage.acts_by, tools, then])
        lines += aligned(rows)
        if talk.program is not None:
            lines.append(_who_plays(talk.program))
            alone = "; nobody else gives rewards" if talk.program["needs_reward"] else ""
            lines.append(f"an episode has at most {talk.most_turns} requests{alone}")
        else:
            lines.append(f"an episode has at most {count_of(talk.most_turns, 'turn')}")
            lines += [_branches(one.node, one.branches) for one in talk.speaking if one.branches]
            together = {tuple(sorted({one.node, *one.beside})): one for one in talk.stages if one.beside}
            lines += [f"{one.node} runs at once with {' and '.join(one.beside)}" for one in together.values()]
        lines += _played(plan, talk)
    return lines


def _branches(node: str, branches: Branches) -> str:
    which = f"visits {', '.join(map(str, branches.visits))}" if branches.visits else "every visit"
    end = "all go on" if branches.go_on == ALL else "the best goes on"
    return f"episodes branch at {node}, {which}: {branches.candidates} candidates of the turn, {end}"


def _who_plays(program: Mapping[str, Any]) -> str:
    if not program["listen"]:
        return f"a program plays each episode: {program['command']}"
    host, _, port = program["address"].rpartition(":")
    where = f"port {port} + rank" if int(port) else "a free port"
    secret = f"the secret in {program['token_env']}" if program["token_env"] else "the run's token"
    return f"clients play the episodes: each rank that plays listens on {host}, {where}; they show {secret}"


def goes_to(stage: StagePlan) -> str:
    """Where an episode goes after a stage, in words."""
    end = " and ".join(stage.following) or "the end"
    if stage.route is not None:
        again = f", back at most {stage.max_turns - 1} times" if stage.back_to else ""
        return f"where {stage.route} says{again}"
    if not stage.back_to:
        return end
    until = f" until {stage.until} is true or" if stage.until else " until"
    return f"back to {' and '.join(stage.back_to)}{until} it has run {stage.max_turns} times; then {end}"


def _credit(plan: Plan, configs: Configs) -> list[str]:
    """Whose rewards count for whom, and who trains when."""
    rows = credit_rows(plan, configs)
    return (aligned(rows) if len(rows) > 1 else []) + training_turns(plan, configs)


def _asked(plan: Plan, interaction: InteractionPlan, policy: str) -> dict[int, Ranks]:
    """Rank -> the drivers that its engine of a policy is served to."""
    ranks = plan.models[policy].ranks if policy in interaction.policies else ()
    return {head: clients for head in ranks if (clients := interaction.clients(policy, head))}


def _played(plan: Plan, talk: InteractionPlan) -> list[str]:
    """On which ranks its episodes are played, and whose engine each asks for the turns of a policy."""
    drivers = plan.run_of(talk.entry).ranks
    lines = [f"episodes are played on {_ranks(drivers)}"]
    for policy in talk.policies:
        served: dict[Ranks, list[int]] = {}
        for head, clients in _asked(plan, talk, policy).items():
            served.setdefault(clients, []).append(head)
        own = [rank for rank in drivers if rank in talk.heads(policy, rank)]
        own = [rank for rank in own if not talk.clients(policy, rank)]
        parts = [f"{_asks(own)} {'its' if len(own) == 1 else 'their'} own engine"] if own else []
        parts += [f"{_asks(clients)} {_ranks(heads)}" for clients, heads in served.items()]
        more = len(parts) - _MOST_GROUPS
        shown = parts[:_MOST_GROUPS] + ([f"and {more} more"] if more > 0 else [])
        lines.append(f"  {policy}: {', '.join(shown)}")
    return lines


def _nodes_by_rank(plan: Plan) -> list[str]:
    classes = rank_classes(plan)
    rows = [["", "node", "op", "agent", *(format_ranks(ranks) for ranks, _ in classes)]]
    for position, (name, node) in enumerate(plan.nodes.items(), 1):
        marks = [nodes.get(name, "") for _, nodes in classes]
        op = node.op if node.executable is None else node.executable
        rows.append([str(position), name, op, str(node.agent), *marks])
    idle = [format_ranks(ranks) for ranks, nodes in classes if not nodes]
    return aligned(rows) + [f"ranks {ranks} have nothing to do" for ranks in idle]


def _models(plan: Plan) -> list[str]:
    rows = [["model", "backend", "ranks", "parallel", "built from", "weights"]]
    weights = {
        link.target: f"from {link.source} ({link.kind}, over {count_of(len(link.ranks), 'rank')})"
        for link in plan.links.values()
    }
    for model in plan.models.values():
        source = weights.get(model.name, "trained here" if model.trains else "frozen")
        if model.base not in (None, model.name):
            source += f", on the base of {model.base}"
        rows.append([model.name, model.backend, format_ranks(model.ranks), sizes(model), model.node, source])
    return aligned(rows) + [line for model in plan.models.values() for line in _coordinates(model)]


def pool_line(pool: PoolPlan) -> str:
    """Which versions an opponent plays as, and which are kept."""
    promoted = [f"after every {count_of(pool.every_steps, 'step')}"] if pool.every_steps else []
    promoted += [f"at a win rate of {pool.win_rate:g}"] if pool.win_rate is not None else []
    current = f", with probability {pool.current:g} of now" if pool.current else ""
    kept = f"of {pool.size} at most, kept {' and '.join(promoted) or 'once, before the first step'}"
    return f"each step a version, drawn by {pool.sampling}{current}, {kept}"


def _when(link: LinkPlan) -> str:
    """When the weights of a link are brought, and how."""
    if link.pool is not None:
        return pool_line(link.pool)
    if link.every_steps is None:
        return "if newer"
    when = "each step" if link.every_steps == 1 else f"every {link.every_steps} steps"
    return when if link.share == 1 else f"{when}, a share of {link.share:g}"


def sizes(model: ModelPlan, every: bool = False) -> str:
    """The parallel sizes of a model, e.g. "dp 8 (2 replicas x 4 shards)"; every: also those that are 1."""
    dims = model.dims
    axes = [
        f"{axis} {getattr(dims, axis)}"
        for axis in ("tp", "pp", "cp", "ep", "etp", "vpp")
        if getattr(dims, axis) > 1 or (every and axis in ("tp", "pp", "cp", "ep"))
    ]
    dp = f"dp {dims.dp}"
    shards = dims.weight_shards if backend_of(model).gathers_weights else 1
    if shards > 1:
        replicas = f"{count_of(dims.dp_replicate, 'replica')} x " if dims.dp_replicate > 1 else ""
        dp += f" ({replicas}{count_of(shards, 'shard')})"
    return ", ".join([*axes, dp])


def _coordinates(model: ModelPlan) -> list[str]:
    """Where each rank of a model sits on the axes that it has: a line for each tensor-parallel group.

    A line reads "ranks 4-7: tp 0-3, cp 0, dp 1, pp 0": the i-th rank has the i-th coordinate, or all have the
    only one.
    """
    dims = model.dims
    places = [dims.coordinates(local) for local in range(dims.world)]
    shown = ("dp_shard", "dp_replicate") if dims.dp_shard > 1 and dims.dp_replicate > 1 else ()
    axes = [axis for axis in ("tp", "cp", "dp", "pp", "ep", "etp", *shown) if getattr(dims, axis) > 1]
    if dims.ep * dims.etp > 1 and dims.expert_dp > 1:
        axes.append("expert_dp")
    if not axes:
        return []
    widths = (dims.tp, dims.cp, dims.ep * dims.etp, dims.world // dims.pp, dims.world)
    width = next(width for width in widths if width > 1)
    lines = []
    for first in range(0, dims.world, width):
        members = range(first, first + width)
        listed = []
        for axis in axes:
            values = [places[member][axis] for member in members]
            listed.append(f"{axis} {values[0] if len(set(values)) == 1 else format_ranks(values)}")
        ranks = format_ranks([model.ranks[member] for member in members])
        lines.append(f"  ranks {ranks}: {', '.join(listed)}")
    more = len(lines) - _MOST_LINES
    return [
        f"{model.name} by rank",
        *lines[:_MOST_LINES],
        *([f"  and {more} more lines"] if more > 0 else []),
    ]


def _instructions(plan: Plan) -> list[str]:
    rows: list[list[str]] = [["", "ranks", ""]]
    for ins in plan.instructions:
        ranks = format_ranks(ins.ranks)
        match ins:
            case Load(loader, keys, layout, _):
                ahead = plan.loaders[loader].ahead
                more = f", {count_of(ahead, 'batch', 'es')} ahead" if ahead else ""
                rows.append(["load", ranks, f"{loader}: {count_of(len(keys), 'column')} into {layout}{more}"])
            case Reshard(keys, route, _):
                names = [key.name for key in keys]
                what = "wait" if set(names) <= set(ROUTING) else "reshard"
                rows.append([what, ranks, f"{route}: {', '.join(names)}"])
            case SyncWeights(link, _):
                made = plan.links[link]
                rows.append(["weights", ranks, f"{made.source} -> {made.target}, {_when(made)}"])
            case Serve(node, _):
                names = [name for name in plan.interactions[node].policies if _serves(plan, ins, name)]
                on = ", also while others train" if names and plan.nodes[node].runs_in_background else ""
                rows.append(["serve", ranks, f"{', '.join(names) or 'nobody'} to {node}{on}"])
            case Repeat(node, _):
                rows.append(["repeat", ranks, f"until {node} has enough rows:"])
            case Collect(node, _, source, _):
                rows.append(["collect", ranks, f"{node} keeps rows of {source}"])
            case Until(node, _):
                rows.append(["until", ranks, f"{node} has enough rows"])
            case Run(node, _, _, source, target, _):
                max_lag = plan.nodes[node].max_lag
                age = f", rows up to {count_of(max_lag, 'step')} old" if max_lag else ""
                where = source if source == target else f"{source} -> {target}"
                rows.append(["run", ranks, f"{node} on {where}{age}"])
            case Free():
                continue
    layouts = [
        f"  {name}: {count_of(layout.num_shards, 'shard')} on ranks {format_ranks(layout.ranks)}, "
        f"{_split(layout)}"
        for name, layout in plan.layouts.items()
    ]
    return [*aligned(rows), "layouts", *layouts]


def _serves(plan: Plan, ins: Serve, policy: str) -> bool:
    return not set(ins.ranks).isdisjoint(_asked(plan, plan.interactions[ins.node], policy))


def _split(layout: Layout) -> str:
    if layout.split == "group":
        return "samples of a prompt together"
    unit = f"mini-batch of {layout.mini_batch_rows} rows" if layout.mini_batch_rows else "batch"
    return f"each {unit} balanced by compute cost"


def _groups(plan: Plan) -> list[str]:
    lines = [f"{format_ranks(ranks)}" for ranks in plan.groups[:_MOST_GROUPS]]
    more = len(plan.groups) - len(lines)
    return lines + ([f"and {more} more"] if more else [])


def _memory(plan: Plan, configs: dict[str, Config], device_gib: float | None) -> list[str]:
    return [*memory_table(plan, configs, device_gib), *_resident(plan, configs)]


def _resident(plan: Plan, configs: dict[str, Config]) -> list[str]:
    """What engines that are resident at once take of their devices."""
    return [
        f"ranks {format_ranks(ranks)}: while {entry} plays its episodes, engines take {shares_text(shares)} "
        "of the device"
        for entry, talk in plan.interactions.items()
        for ranks, shares in resident_shares(talk, plan.models, configs).items()
    ]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)}"


def _asks(ranks: Sequence[int]) -> str:
    return f"{_ranks(ranks)} ask{'s' if len(ranks) == 1 else ''}"
