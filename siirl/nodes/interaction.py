"""The ops of an interaction: prompts in, episodes played, the rows of each agent out."""

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from siirl.agents.contexts import Limits
from siirl.agents.environments import HostedEnvironment, load_environment
from siirl.agents.episode import Episode
from siirl.agents.renderer import ChatRenderer
from siirl.agents.runner import Game, Played, Speaker, run_all
from siirl.agents.tool_files import ToolUse, tool_use
from siirl.compiler.interactions.stages import process_call
from siirl.compiler.plan import AgentStage, InteractionPlan
from siirl.config import Config
from siirl.config.serve import VERIFIERS
from siirl.config.trainer import TrainerConfig
from siirl.data.image_reader import ImageReader
from siirl.data.rows import objects, seen_of
from siirl.dialect.dialect import Dialect, dialect_of, untold_tools
from siirl.dialect.template import template_options
from siirl.dialect.tool_formats import AUTO, tool_parser
from siirl.engines.rollout.base import RolloutEngine
from siirl.engines.weights.opponent_pool import OpponentPool
from siirl.errors import DagError, DataError, RolloutError, UserCodeError
from siirl.nodes.context import OpContext, sum_over_ranks
from siirl.nodes.episodes_in_flight import EpisodesInFlight
from siirl.nodes.generate import (
    add_experts,
    prompt_tokens,
    report,
    sampling_params,
    seed_of,
)
from siirl.nodes.interaction_rows import report_episodes, results_of, rows_of, spoken_rows
from siirl.nodes.staleness_report import report_staleness, report_token_staleness
from siirl.nodes.streams import Streams
from siirl.user_code.load_object import load_object
from siirl.user_code.signatures import Call
from siirl.user_code.source import check_loaded

if TYPE_CHECKING:
    from siirl.agents.outside.programs import Programs  # its HTTP server takes a third of a second
    from siirl.agents.outside.session_queue import ListenAddress

log = logging.getLogger(__name__)
UNBOUNDED = 1 << 30  # positions of a context whose tokens only a service counts


LISTENS = "listen"
"""Folder of a run with the addresses at which its ranks wait for clients."""


@dataclass
class Interaction:
    """One interaction on this rank: what its ops share."""

    plan: InteractionPlan
    cfgs: dict[str, Config]
    """Of each agent's node."""
    tokenizers: dict[str, PreTrainedTokenizerBase]
    """Of each agent's node; a shared policy has that of its owner."""
    engines: dict[str, RolloutEngine]
    """Those on this rank, by the name of the rollout model."""
    streams: Streams
    functions: dict[str, Callable[..., Any]]
    make_env: Callable[[], HostedEnvironment] | None
    env_deadline_s: float
    tools: dict[str, ToolUse]
    readers: dict[str, ImageReader] = field(default_factory=dict)
    """Of each agent's node whose model sees images."""
    programs: "Programs | None" = None
    """What lets a program play the episodes, if one does."""
    pools: Sequence[OpponentPool] = ()
    """Of the opponents that play as kept versions of a policy."""
    rows: dict[int, TensorDict] = field(default_factory=dict)
    """Agent -> its rows, from one Run to the next."""
    experts: dict[int, list[bytes | None]] = field(default_factory=dict)
    """Agent -> what the tokens of each of these were computed by."""
    step_of: dict[str, dict[int, int]] = field(default_factory=dict)
    """Asynchronous: rollout model -> version of weights -> the training step that sampled with it."""
    told: bool = False
    """The log has said that episodes ended because a context was full."""
    told_of_tools: bool = False
    """The log has said that a chat template shows no tools."""

    def close(self) -> None:
        """End the programs that play episodes. Idempotent."""
        if self.programs is not None:
            self.programs.endpoint.close()


def build_interaction(
    plan: InteractionPlan,
    cfgs: dict[str, Config],
    tokenizers: dict[str, PreTrainedTokenizerBase],
    engines: Mapping[str, RolloutEngine],
    streams: Streams,
    rank: int = 0,
    pools: Sequence[OpponentPool] = (),
) -> Interaction:
    """Load the code that an interaction names. DagError or DataError if it cannot be used."""
    functions: dict[str, Callable[..., Any]] = {}
    make_env, deadline_s = None, 60.0
    for stage in plan.speaking:
        engine = engines.get(stage.model)
        if engine is not None and engine.vocabulary is not None:
            tokenizers = tokenizers | {stage.node: engine.vocabulary}
    for stage in plan.stages:
        who = f"node {stage.node!r}"
        for key, reference in (("until", stage.until), ("route", stage.route)):
            if reference is not None:
                functions[reference] = load_object(reference, f"{who}: {key}")
                check_loaded(functions[reference], f"{who}: {key} = {reference!r}", Call(("episode",)))
    for stage in plan.speaking:
        who = f"node {stage.node!r}"
        for name in ("pre_process", "post_process"):
            if (kwargs := getattr(stage, f"{name}_kwargs")) is not None:
                function = load_object(f"{stage.process_path}:{name}", f"{who}: {name}")
                check_loaded(function, f"{who}: {name}", process_call(name, kwargs))
                functions[f"{stage.node}.{name}"] = functools.partial(function, **kwargs)
        if not tokenizers[stage.node].chat_template:
            raise DataError(
                f"{who}: the tokenizer of {tokenizers[stage.node].name_or_path} has no chat template, which "
                "turns what others said into tokens. Use a chat model's tokenizer (data.tokenizer)."
            )
    for stage in plan.acting:
        if env := stage.env:
            who, deadline_s = f"node {stage.node!r}: env_path", env.deadline_s
            make_env = load_environment(env.path, who, env.kwargs, env.max_concurrent)
            if plan.branching and not make_env().replayable:
                raise DagError(
                    f"{who} = {env.path!r}: episodes branch (rollout.agent.branch), and the class does not "
                    "say that "
                    "the same seed and actions lead to the same state. If they do, write replayable = True "
                    "into it."
                )
    return Interaction(
        plan,
        cfgs,
        tokenizers,
        {name: engines[name] for name in plan.policies if name in engines},
        streams,
        functions,
        make_env,
        deadline_s,
        {node: use for node, cfg in cfgs.items() if (use := _tools(node, cfg))},
        _readers(plan, cfgs),
        _programs(plan, cfgs[plan.entry].trainer, rank),
        pools,
    )


def _tools(node: str, cfg: Config) -> ToolUse | None:
    return tool_use(cfg.actor_rollout_ref.rollout.multi_turn, f"node {node!r}", cfg.data.has_images)


def _readers(plan: InteractionPlan, cfgs: Mapping[str, Config]) -> dict[str, ImageReader]:
    """What counts the tokens of images for each agent's node: that of the policy's model."""
    found = {stage.node: ImageReader.from_config(cfgs[plan.homes[stage.policy]]) for stage in plan.speaking}
    return {node: reader for node, reader in found.items() if reader is not None}


def _programs(plan: InteractionPlan, trainer: TrainerConfig, rank: int) -> "Programs | None":
    """What lets programs play, if the plan says so."""
    program = plan.program
    if program is None:
        return None
    from siirl.agents.outside.endpoint import Endpoint, ProgramLimits
    from siirl.agents.outside.programs import Programs, starter
    from siirl.agents.outside.session_queue import SessionQueue

    limits = ProgramLimits(program["deadline_s"], program["max_requests"], program["max_concurrent"])
    name = program["tool_format"]
    parse = None if name == AUTO else tool_parser(name, "actor_rollout_ref.serve.tool_format")
    if program["listen"]:
        return Programs(
            Endpoint(SessionQueue(_listen_address(plan, program, trainer, rank)), limits, program["sandbox"]),
            parse,
            program["needs_reward"],
        )
    command: Any = program["command"]
    if program["is_function"]:
        who = f"node {plan.entry!r}: actor_rollout_ref.serve.command"
        function = load_object(command, who)
        check_loaded(function, f"{who} = {command!r}", Call(("session",), awaits=True))
        command = function
    elif command == VERIFIERS:
        from siirl.agents.outside.verifiers_episodes import play as command
    endpoint = Endpoint(starter(command), limits, program["sandbox"])
    return Programs(endpoint, parse, program["needs_reward"])


def _listen_address(
    plan: InteractionPlan, program: Mapping[str, Any], trainer: TrainerConfig, rank: int
) -> "ListenAddress":
    """Where clients find this rank."""
    from siirl.agents.outside.session_queue import ListenAddress, token_of

    host, _, port = program["address"].rpartition(":")
    return ListenAddress(
        host.strip("[]"),
        int(port) and int(port) + rank,
        Path(trainer.output_dir).expanduser() / LISTENS / f"{plan.entry}_rank_{rank}.json",
        token_of(program["token_env"]),
        program["idle_s"],
        trainer.deadline_s,
    )


def interaction(
    ctx: OpContext, rows: TensorDict, interaction: Interaction, in_flight: EpisodesInFlight | None
) -> TensorDict:
    """Play n episodes of each prompt; the rows of this agent, those of the others are kept for `turns`.

    in_flight: of an asynchronous interaction. Rows are then the prompts that were loaded, maybe several
    batches or none; what it gives is of as many prompts as a batch has, of this step or some steps before.
    Without it, and in validation, which plays its own prompts while others wait, it is of these prompts.
    Communicates with the engines of policies on other ranks, and over ctx.group, the ranks that play.
    RolloutError if every episode of all these ranks fails, or user code raises (then a UserCodeError); as
    Streams.open does, too. A rank whose own episodes all fail goes on without rows.
    """
    n = samples_of_prompt(ctx)
    if in_flight is None or ctx.validate:
        episodes = episodes_of(ctx, interaction, rows, n, [ctx.step] * len(rows))
        prompts = [tokens for tokens in prompt_tokens(rows) for _ in range(n)]
        run = asyncio.run
        if in_flight is not None:
            in_flight.pause()
            run = in_flight.run
        with interaction.streams.step(), interaction.streams.open() as policies:
            played = run_all(game_of(interaction, policies, ctx.validate), episodes, prompts, run)
    else:
        with interaction.streams.step() as versions:
            rows, played = _asynchronous(ctx, rows, interaction, in_flight, n, versions)
    return give_rows(ctx, interaction, rows, played, n)


def _asynchronous(
    ctx: OpContext,
    rows: TensorDict,
    shared: Interaction,
    in_flight: EpisodesInFlight,
    n: int,
    versions: Mapping[str, int],
) -> tuple[TensorDict, list[Played]]:
    """The prompts that leave now, and their episodes. versions: see Streams.step."""

    def begin(prompts: TensorDict, batches: list[int]) -> list[list[tuple[Episode, list[int]]]]:
        episodes = iter(episodes_of(ctx, shared, prompts, n, batches))
        return [[(next(episodes), tokens) for _ in range(n)] for tokens in prompt_tokens(prompts)]

    in_flight.admit(rows, ctx.step)
    left = in_flight.play(
        lambda: shared.streams.open(in_flight.may_end, ctx.node.plan.runs_in_background),
        lambda gates: game_of(shared, gates, validate=False),
        begin,
        ctx.step,
        versions,
    )
    shared.step_of = left.step_of
    dropped = in_flight.drain_dropped()
    numbers = left.num_partial, left.num_restarted, dropped, left.num_in_flight, left.num_replayed
    report_staleness(ctx, left.staleness, *numbers)
    return left.prompts, left.played


def give_rows(
    ctx: OpContext, shared: Interaction, rows: TensorDict, played: list[Played], n: int
) -> TensorDict:
    """The rows of this agent in the n episodes of each prompt; those of the others are kept for `turns`.

    Collective over ctx.group. Errors of `interaction`.
    """
    finished = _finished(ctx, played, rows)
    _warn_of_full_contexts(ctx, shared, finished)
    report_episodes(ctx, shared.plan, played, finished)
    if not ctx.validate:
        for pool in shared.pools:
            games = torch.tensor(results_of(shared.plan, pool.plan, finished), dtype=torch.float64)
            pool.count(*sum_over_ranks(ctx, games).tolist())
    for engine in shared.engines.values():
        ctx.metrics.merge(engine.drain_metrics())
    agents = {s.policy for s in shared.plan.speaking if s.rows or s.node == shared.plan.entry}
    shared.rows = {agent: rows_of(shared.plan, agent, finished, rows, n) for agent in agents}
    shared.experts = {
        agent: [row.experts for *_, row in spoken_rows(shared.plan, agent, finished)] for agent in agents
    }
    return turns(ctx, rows, shared)


def turns(ctx: OpContext, rows: TensorDict, interaction: Interaction) -> TensorDict:
    """The rows of an agent in the episodes that have been played. No communication."""
    out = interaction.rows.pop(ctx.agent)
    add_experts(ctx.cfg, out, interaction.experts.pop(ctx.agent))
    step_of = interaction.step_of.get(f"agent_{ctx.agent}.rollout")
    if step_of and not ctx.validate:
        versions, counts = out["weight_version"].unique(return_counts=True)
        found = zip(versions.tolist(), counts.tolist(), strict=True)
        report_token_staleness(ctx, {step_of[version]: count for version, count in found if version >= 0})
    report(ctx, out, full_at=ctx.cfg.actor_rollout_ref.rollout.response_length)
    return out


def samples_of_prompt(ctx: OpContext) -> int:
    """How many episodes a prompt has."""
    rollout = ctx.cfg.actor_rollout_ref.rollout
    return rollout.val_kwargs.n if ctx.validate else rollout.n


def episodes_of(
    ctx: OpContext, shared: Interaction, rows: TensorDict, n: int, steps: Sequence[int]
) -> list[Episode]:
    """n episodes of each prompt, those of a prompt in a row. steps: of each prompt, that of its seeds."""
    env = shared.plan.environment
    one_per_prompt = env is not None and env.seed == "prompt"
    names = ("raw_prompt", "data_source", "ground_truth", "extra_info")
    tasks = zip(*(objects(rows, name) for name in names), strict=True)
    episodes = []
    columns = rows["group_id"].tolist(), tasks, steps, seen_of(rows)
    for group_id, values, step, seen in zip(*columns, strict=True):
        for sample in range(n):
            place = group_id * n + sample
            task: dict[str, Any] = dict(zip(names, values, strict=True))
            if "images" in rows.keys():
                task["images"] = list(seen.images)
            seed, most = seed_of(ctx, str(place), step=step), 1 if ctx.validate else shared.plan.most_branches
            episode = Episode(place * most, group_id, sample, seed, task, seen)
            if one_per_prompt or ctx.validate:
                drawn = f"env/{group_id}" if one_per_prompt else f"env/{group_id}/{sample}"
                episode.env_seed = seed_of(ctx, drawn, fixed=ctx.validate, step=step)
            episodes.append(episode)
    return episodes


def game_of(shared: Interaction, policies: Mapping[str, tuple[Any, ...]], validate: bool) -> Game:
    """The interaction with its code. policies: of each rollout model, its engines."""
    speakers = {stage.node: _speaker(stage, shared, policies, validate) for stage in shared.plan.speaking}
    return Game(
        shared.plan,
        speakers,
        shared.functions,
        shared.make_env,
        shared.env_deadline_s,
        shared.programs,
        bool(shared.plan.branching) and not validate,
    )


def _speaker(
    stage: AgentStage, shared: Interaction, policies: Mapping[str, tuple[Any, ...]], validate: bool
) -> Speaker:
    cfg, tokenizer = shared.cfgs[stage.node], shared.tokenizers[stage.node]
    tools = shared.tools.get(stage.node)
    rollout = cfg.actor_rollout_ref.rollout
    name = stage.model
    counted = name not in shared.engines or shared.engines[name].vocabulary is None
    dialect = dialect_of(cfg, tokenizer) if counted else Dialect.of_service(tokenizer)
    if tools is not None and not shared.told_of_tools and (untold := untold_tools(dialect)):
        shared.told_of_tools = True
        log.warning("node %r: %s.", stage.node, untold)
    if tools is not None and rollout.multi_turn.format == AUTO and dialect.tool_format is not None:
        tools = replace(tools, parse=tool_parser(AUTO, dialect=dialect.tool_format))
    first, *more = policies[name]
    return Speaker(
        policy=first,
        more=tuple(more),
        shares=shared.streams.shares(name),
        params=replace(sampling_params(cfg, dialect.stop_ids, validate), n=1),
        renderer=ChatRenderer(
            tokenizer,
            template_options(cfg),
            tools.toolbox.schemas if tools else (),
            shared.readers.get(stage.node),
            dialect,
        ),
        limits=Limits(
            rollout.prompt_length if counted else UNBOUNDED,
            rollout.response_length if counted else UNBOUNDED,
            rollout.agent.max_turn_tokens,
            "truncate" if rollout.agent.long_context == "truncate" else "end",
            "grow" if rollout.agent.history == "grow" else "as_template",
        ),
        pre_process=shared.functions.get(f"{stage.node}.pre_process"),
        post_process=shared.functions.get(f"{stage.node}.post_process"),
        tools=tools,
        heard_text=rollout.agent.heard_text,
    )


def _finished(ctx: OpContext, played: list[Played], rows: TensorDict) -> list[Played]:
    """The episodes that did not fail. Collective over ctx.group: 16 bytes."""
    failed = [one for one in played if one.kind is not None]
    all_failed, all_played = sum_over_ranks(
        ctx, torch.tensor([len(failed), len(played)], dtype=torch.float64)
    )
    if failed:
        first, node = failed[0].episode, failed[0].node
        groups, prompts = rows["group_id"].tolist(), rows["sample_index"].tolist()
        prompt_of = dict(zip(groups, prompts, strict=True))
        lost = [(one.episode.group_id, f"its episode failed: {one.kind}") for one in failed]
        ctx.lost.extend((prompt_of[group], group, why) for group, why in lost)
        task = groups.index(first.group_id)
        which = f"{first.task['data_source']}, row {int(rows['sample_index'][task])}"
        here = " of this rank" if all_played > len(played) else ""
        count = f"{len(failed)} of {len(played)} episodes{here} failed in {_when(ctx)}"
        text = f"{count}, the first ({which}) at node {node!r}: {first.error}"
        if all_failed == all_played:
            users = str(failed[0].kind).startswith(("env", "program"))
            left = f"Nothing is left to {'score' if ctx.validate else 'train on'}."
            raise (UserCodeError if users else RolloutError)(f"{text}. {left}")
        log.warning("%s", text)
    return [one for one in played if one.kind is None]


def _when(ctx: OpContext) -> str:
    """The step or validation, in words."""
    if not ctx.validate:
        return f"step {ctx.step}"
    return f"the validation after step {ctx.step}" if ctx.step else "the validation before training"


def _warn_of_full_contexts(ctx: OpContext, shared: Interaction, finished: list[Played]) -> None:
    """Say it once in a run, on this rank: what is cut off looks like any other episode."""
    full = [one for one in finished if one.full]
    if not full or shared.told:
        return
    shared.told = True
    log.warning(
        "%d of %d episodes in %s ended because a context was full, the first: %s. Raise it, or set "
        "actor_rollout_ref.rollout.agent.long_context=truncate. This is said once; interaction/context_full "
        "counts them.",
        len(full),
        len(finished),
        _when(ctx),
        full[0].episode.ended,
    )
