"""`siirl plan` as text: who runs where, which rows move, batch arithmetic, memory, and what is left out."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from siirl.compiler.agent_steps import WHOLE, window_of
from siirl.compiler.backends import backend_of
from siirl.compiler.instructions import ROUTING
from siirl.compiler.memory.awake_engines import awake_shares, shares_text
from siirl.compiler.memory.estimate import micro_batch_tokens, read_shape
from siirl.compiler.plan import (
    Collect,
    Free,
    InteractionPlan,
    LinkPlan,
    Load,
    ModelPlan,
    NodePlan,
    Plan,
    Repeat,
    Reshard,
    Run,
    Serve,
    StagePlan,
    SyncWeights,
    Until,
)
from siirl.config import Config
from siirl.config.batch import BatchArithmetic, batch_of
from siirl.config.roles import ROLES, role_group, token_budget, trained_group
from siirl.dag.ops import LATER_OLD_LOG_PROB
from siirl.parallel.pipeline_layers import split_layers
from siirl.parallel.placement import Ranks, format_ranks
from siirl.show.credit_text import Configs, credit_rows, speakers_of, tool_words, training_turns
from siirl.show.memory_text import memory_table
from siirl.show.text_table import table
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
        ("batches", _batches(plan, configs)),
        ("a step", _instructions(plan)),
        ("process groups", _groups(plan)),
        ("memory per rank (estimate)", [*memory_table(plan, configs, device_gib), *_awake(plan, configs)]),
        ("left out", [f"{node}: {why}" for node, why in plan.pruned.items()]),
    ]
    head = f"plan of DAG {plan.dag_id!r} on {_count(plan.world_size, 'rank')}"
    body = ["\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections if lines]
    return "\n\n".join([head, *body]) + "\n"


def batch_arithmetic(plan: Plan, configs: dict[str, Config]) -> str:
    """Prompts x responses = sequences -> optimizer steps -> micro-batches on each rank, for each agent."""
    return "\n".join(_batches(plan, configs))


def model_setup(plan: Plan, configs: dict[str, Config]) -> str:
    """A line for each model: backend, ranks and parallel sizes, and how a pipeline cuts its layers."""
    return "\n".join(
        f"{model.name}: {model.backend} on {_count(len(model.ranks), 'rank')} ({format_ranks(model.ranks)}), "
        f"{sizes(model, every=backend_of(model).five_sizes)}{_cut(model, configs[model.node])}"
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
        for stage in interaction.stages:
            for head in _asked(plan, interaction, f"agent_{stage.policy}.rollout"):
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
        for stage in interaction.stages:
            if stage.kind == "agent":
                homes[stage.node] = plan.models[f"agent_{stage.policy}.rollout"].ranks
    return homes


def conversations(plan: Plan, configs: Configs) -> list[str]:
    """For each interaction a table of its nodes: who acts there, by what, and where an episode goes then."""
    lines = []
    for talk in plan.interactions.values():
        rows = [["", "node", "who", "by", "tools", "then"]]
        for position, stage in enumerate(talk.stages, 1):
            who = "environment" if stage.kind == "env" else f"agent {stage.agent}"
            tools = "" if stage.kind == "env" else tool_words(stage.node, configs)
            then = goes_to(stage) if talk.program is None else "where the program says"
            rows.append([str(position), stage.node, who, acts_by(stage), tools, then])
        lines += table(rows)
        if talk.program is not None:
            lines.append(_who_plays(talk.program))
            left_out = "; nobody else gives rewards" if talk.program["needs_reward"] else ""
            lines.append(f"an episode has at most {talk.most_turns} requests{left_out}")
        else:
            lines.append(f"an episode has at most {_count(talk.most_turns, 'turn')}")
        lines += _played(plan, talk)
    return lines


def _who_plays(program: Mapping[str, Any]) -> str:
    if not program["listen"]:
        return f"a program plays each episode: {program['command']}"
    host, _, port = program["address"].rpartition(":")
    where = f"port {port} + rank" if int(port) else "a free port"
    secret = f"the secret in {program['token_env']}" if program["token_env"] else "the run's token"
    return f"clients play the episodes: each rank that plays listens on {host}, {where}; they show {secret}"


def acts_by(stage: StagePlan) -> str:
    """What speaks or acts at a stage: a policy, or the class of an environment, where the stage names it."""
    if stage.kind == "env":
        return stage.options.get("env_path", "")
    kept = "" if stage.policy == stage.agent else " (shared)"
    return f"agent_{stage.policy}.rollout{kept}"


def goes_to(stage: StagePlan) -> str:
    """Where an episode goes after a stage, in words."""
    end = stage.following or "the end"
    if stage.route is not None:
        again = f", back at most {stage.max_turns - 1} times" if stage.back_to else ""
        return f"where {stage.route} says{again}"
    if stage.back_to is None:
        return end
    until = f" until {stage.until} is true or" if stage.until else " until"
    return f"back to {stage.back_to}{until} it has run {stage.max_turns} times; then {end}"


def _credit(plan: Plan, configs: Configs) -> list[str]:
    """Whose rewards count for whom, and who trains when."""
    rows = credit_rows(plan, configs)
    return (table(rows) if len(rows) > 1 else []) + training_turns(plan, configs)


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
    return table(rows) + [f"ranks {ranks} have nothing to do" for ranks in idle]


def _models(plan: Plan) -> list[str]:
    rows = [["model", "backend", "ranks", "parallel", "built from", "weights"]]
    weights = {
        link.target: f"from {link.source} ({link.kind}, over {_count(len(link.ranks), 'rank')})"
        for link in plan.links.values()
    }
    for model in plan.models.values():
        source = weights.get(model.name, "trained here" if model.trains else "frozen")
        if model.base not in (None, model.name):
            source += f", on the base of {model.base}"
        rows.append([model.name, model.backend, format_ranks(model.ranks), sizes(model), model.node, source])
    return table(rows) + [line for model in plan.models.values() for line in _coordinates(model)]


def _when(link: LinkPlan) -> str:
    """When the weights of a link are brought, and how."""
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
    shards = dims.weight_shards if model.backend == "fsdp" else 1
    if shards > 1:
        replicas = f"{_count(dims.dp_replicate, 'replica')} x " if dims.dp_replicate > 1 else ""
        dp += f" ({replicas}{_count(shards, 'shard')})"
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


def _batches(plan: Plan, configs: dict[str, Config]) -> list[str]:
    lines: list[str] = []
    for model in plan.models.values():
        if not model.is_rollout:
            continue
        batch = batch_of(configs[model.node])
        shards, verb = model.dims.dp, "sampled"
        if entry := next((x.entry for x in plan.interactions.values() if model.name in x.policies), None):
            shards, verb = len(plan.run_of(entry).ranks), "played"
        refilled = f" in rounds of {batch.generated} prompts" if batch.in_rounds else ""
        if refilled and plan.nodes[entry or model.node].max_lag:
            refilled = f" in rounds of as many as it lacks, read {batch.generated} at a time"
        share = _share(batch.generated, shards)
        amount = f"{batch.rows} {'episodes' if entry else 'sequences'}"
        lines.append(
            f"agent {model.agent}: {batch.prompts} prompts x {batch.samples} responses = {amount} a "
            f"step{refilled}, {verb} by {_count(shards, 'shard')} of {share} prompts"
            f"{_window(configs[model.node])}"
        )
        lines += _lag(plan.nodes[model.node], configs[model.node], batch, bool(entry))
        speakers = speakers_of(plan, model.agent)
        trainers = [m for m in plan.models.values() if m.agent == model.agent and m.trains]
        if trainers and speakers:
            agents = ", ".join(map(str, speakers))
            who = "each episode in which it" if len(speakers) == 1 else f"each of agents {agents} that"
            where, most = "" if len(speakers) == 1 else " in an episode", batch.rows * len(speakers)
            why = "more where a context is full or rewritten"
            lines.append(f"  a row for {who} speaks{where}: at most {most}, {why}")
        for trainer in trainers:
            training = _training(trainer, configs[trainer.node], batch, len(speakers))
            training += _old_log_probs(plan, trainer, configs[trainer.node])
            lines += [f"  {trainer.role}:", *(f"    {line}" for line in training)]
    return lines + [line for name in plan.nodes for line in _given(plan, name, configs)]


def _given(plan: Plan, name: str, configs: dict[str, Config]) -> list[str]:
    """The batch of an agent whose responses are those of the dataset, and what is trained on it."""
    node, batch = plan.nodes[name], batch_of(configs[name])
    if not node.spec.gives_data:
        return []
    amount = f"{batch.prompts} prompts x {_count(batch.samples, 'response')} of the dataset"
    lines = [f"agent {node.agent}: {amount} = {batch.rows} sequences a step{_window(configs[name])}"]
    for model in plan.models.values():
        for trainer in model.nodes:
            if plan.nodes[trainer].agent == node.agent and plan.nodes[trainer].spec.trains:
                training = _training(model, configs[trainer], batch, 0)
                lines += [f"  {trainer}, of {model.name}:", *(f"    {line}" for line in training)]
    return lines


def _window(cfg: Config) -> str:
    """In which steps an agent takes part, if not in all."""
    first, last = window_of(cfg)
    if (first, last) == WHOLE:
        return ""
    return f", in steps {first} to {'the last' if last is None else last}"


def _old_log_probs(plan: Plan, trainer: ModelPlan, cfg: Config) -> list[str]:
    """Of how many mini-batches they are computed, where that is not all of them."""
    if all(node.op != LATER_OLD_LOG_PROB.name for node in plan.nodes.values() if node.model == trainer.name):
        return []
    count = batch_of(cfg, trainer.role).mini_batches
    return [f"old log-probs of {count - 1} of {count} mini-batches: the first one's are its own log-probs"]


def _lag(node: NodePlan, cfg: Config, batch: BatchArithmetic, talks: bool) -> list[str]:
    """What is in work besides a batch, and how old it may be."""
    if not node.max_lag:
        return []
    rollout = cfg.actor_rollout_ref.rollout
    prompts = int((1 + rollout.surplus) * batch.prompts)
    if node.decodes_on:
        kept = ", with the keys and values that they have" if rollout.keeps_kv else ""
        rest = (
            "the engines go on with them while the trainer trains, and under its new weights after each sync"
            + kept
        )
    else:
        kept = _kept_memory(cfg) if rollout.keeps_kv else "no device memory"
        rest = f"those that a step does not complete keep their tokens, and {kept}, and go on in the next one"
    rest += {
        "wait": "",
        "restart": "; those that would be older begin anew",
        "drop": "; those that would be older are dropped, and others loaded in their place",
    }[rollout.stale]
    return [
        f"  at most {_count(node.max_lag, 'step')} old: up to {prompts} prompts ({prompts * batch.samples} "
        f"{'episodes' if talks else 'responses'}) are in work; {rest}"
    ]


def _kept_memory(cfg: Config) -> str:
    """What a paused engine keeps for the keys and values of its responses (rollout.keep_kv)."""
    if cfg.trainer.device == "cpu":
        return "the engine its KV cache"
    rollout = cfg.actor_rollout_ref.rollout
    share = rollout.engine_kwargs.vllm.get("gpu_memory_utilization") or rollout.gpu_memory_utilization
    return f"the engine its KV cache (with its weights, {share:g} of the device)"


def _training(trainer: ModelPlan, cfg: Config, sampled: BatchArithmetic, num_speakers: int) -> list[str]:
    """num_speakers: of the policy, in an interaction, where rows are bounded and not known; else 0."""
    group = trained_group(cfg, trainer.role)
    batch, shards = batch_of(cfg, trainer.role), trainer.dims.dp
    mini = batch.mini_prompts
    rows = mini * sampled.samples * max(num_speakers, 1)
    bound, noun = ("up to ", "row") if num_speakers else ("", "sequence")
    epochs = f" x {batch.epochs} epochs" if batch.epochs > 1 else ""
    lines = [
        f"{_count(sampled.prompts // mini, 'mini-batch', 'es')} of {mini} prompts = {bound}{rows} "
        f"{noun}s{epochs} -> {_count(batch.optimizer_steps, 'optimizer step')}",
        f"a mini-batch is {bound}{_share(rows, shards)} {noun}s on each of "
        f"{_count(shards, 'data-parallel rank')}",
    ]
    per_rank = -(-rows // shards)
    if group.use_dynamic_bsz:
        most = -(-per_rank * _row_tokens(cfg) // micro_batch_tokens(trainer, cfg, trains=True))
        keys = ROLES[trainer.role].train
        assert keys is not None, f"{trainer.name} does not train"
        budget = token_budget(cfg, trainer.role, keys)
        lines.append(f"-> micro-batches of up to {budget} tokens: at most about {most} on each rank")
    else:
        micro = group.ppo_micro_batch_size_per_gpu
        count = _count(-(-per_rank // micro), "micro-batch", "es")
        lines.append(f"-> {bound}{count} of {_count(micro, noun)} on each rank")
    return lines


def _row_tokens(cfg: Config) -> int:
    return cfg.actor_rollout_ref.rollout.prompt_length + cfg.actor_rollout_ref.rollout.response_length


def _share(total: int, parts: int) -> str:
    return str(total // parts) if total % parts == 0 else f"{total // parts}-{total // parts + 1}"


def _instructions(plan: Plan) -> list[str]:
    rows: list[list[str]] = [["", "ranks", ""]]
    for ins in plan.instructions:
        ranks = format_ranks(ins.ranks)
        match ins:
            case Load(loader, keys, layout, _):
                ahead = plan.loaders[loader].ahead
                more = f", {_count(ahead, 'batch', 'es')} ahead" if ahead else ""
                rows.append(["load", ranks, f"{loader}: {_count(len(keys), 'column')} into {layout}{more}"])
            case Reshard(keys, route, _):
                names = [key.name for key in keys]
                what = "wait" if set(names) <= set(ROUTING) else "reshard"
                rows.append([what, ranks, f"{route}: {', '.join(names)}"])
            case SyncWeights(link, _):
                made = plan.links[link]
                rows.append(["weights", ranks, f"{made.source} -> {made.target}, {_when(made)}"])
            case Serve(node, _):
                names = [name for name in plan.interactions[node].policies if _serves(plan, ins, name)]
                rows.append(["serve", ranks, f"{', '.join(names) or 'nobody'} to {node}"])
            case Repeat(node, _):
                rows.append(["repeat", ranks, f"until {node} has enough rows:"])
            case Collect(node, _, source, _):
                rows.append(["collect", ranks, f"{node} keeps rows of {source}"])
            case Until(node, _):
                rows.append(["until", ranks, f"{node} has enough rows"])
            case Run(node, _, _, source, target, _):
                lag = plan.nodes[node].max_lag
                age = f", rows up to {_count(lag, 'step')} old" if lag else ""
                where = source if source == target else f"{source} -> {target}"
                rows.append(["run", ranks, f"{node} on {where}{age}"])
            case Free():
                continue
    layouts = [
        f"  {name}: {_count(layout.num_shards, 'shard')} on ranks {format_ranks(layout.ranks)}, "
        f"{_split(layout)}"
        for name, layout in plan.layouts.items()
    ]
    return [*table(rows), "layouts", *layouts]


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


def _awake(plan: Plan, configs: dict[str, Config]) -> list[str]:
    """What engines that are awake at once take of their devices."""
    return [
        f"ranks {format_ranks(ranks)}: while {entry} plays its episodes, engines take {shares_text(shares)} "
        "of the device"
        for entry, talk in plan.interactions.items()
        for ranks, shares in awake_shares(talk, plan.models, configs).items()
    ]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)}"


def _asks(ranks: Sequence[int]) -> str:
    return f"{_ranks(ranks)} ask{'s' if len(ranks) == 1 else ''}"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{plural}"
