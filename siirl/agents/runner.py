"""Plays the episodes of an interaction: one asyncio task for each, no barrier between them.

consumes: episodes that have begun nowhere. produces: what each agent read and said, as tokens. waits for:
policies, tools and environments. unblocked by: their answers or deadlines.
"""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from siirl.agents.contexts import Chat, ChatRenderer, Context, ContextFull, Limits
from siirl.agents.environments import HostedEnvironment, StepResult, Texts, reset_env, step_env
from siirl.agents.episode import Episode, Message
from siirl.agents.policy import Policy
from siirl.agents.tool_use import ToolUse
from siirl.dag.plan import InteractionPlan, StagePlan
from siirl.errors import EpisodeFailed, RolloutError


@dataclass(frozen=True)
class Speaker:
    """How the agent of a stage speaks. params: sampling parameters of its policy's engine, with n = 1.

    pre_process(messages, episode) gives the messages that it sees; post_process(text, episode) what others
    get to read of its turn. tools: those that it may call.
    """

    policy: Policy
    params: Any
    renderer: ChatRenderer
    limits: Limits
    pre_process: Callable[[Chat, Episode], Chat] | None = None
    post_process: Callable[[str, Episode], str] | None = None
    tools: ToolUse | None = None


@dataclass(frozen=True)
class Game:
    """An interaction with everything that it needs. functions: reference of until or route -> function."""

    plan: InteractionPlan
    speakers: dict[str, Speaker]
    functions: dict[str, Callable[[Episode], Any]] = field(default_factory=dict)
    make_env: Callable[[], HostedEnvironment] | None = None
    env_deadline_s: float = 60.0


@dataclass
class Played:
    """An episode that is over. contexts: agent -> what it read and said. kind: why it failed, if it did."""

    episode: Episode
    contexts: dict[int, Context]
    prompt_ids: list[int] | None = None
    kind: str | None = None
    full: bool = False  # a context was full, which ended the episode


def run_all(game: Game, episodes: Sequence[Episode], prompts: Sequence[list[int]]) -> list[Played]:
    """Play all episodes side by side, in order of `episodes`. prompts: tokens of each one's raw_prompt, by
    the template and tokenizer of the first agent. An episode that fails is marked; other errors end the run.
    """

    async def everything() -> list[Played]:
        pairs = zip(episodes, prompts, strict=True)
        return await asyncio.gather(*(run_episode(game, episode, prompt) for episode, prompt in pairs))

    return asyncio.run(everything())


async def run_episode(game: Game, episode: Episode, prompt_ids: list[int] | None = None) -> Played:
    """Play one episode to its end, from reset to close of its environment."""
    played = Played(episode, {}, prompt_ids)
    episode.messages += [_message(message) for message in episode.task["raw_prompt"]]
    try:
        await _play(game, played)
    except EpisodeFailed as error:
        episode.error, played.kind = str(error), error.kind
    except ContextFull:
        played.full = True
    finally:
        if episode.env is not None:
            await episode.env.close()
    return played


async def _play(game: Game, played: Played) -> None:
    episode = played.episode
    if game.make_env is not None:
        episode.env = game.make_env()
        seen = await reset_env(episode.env, episode.task, episode.seed, game.env_deadline_s)
        shows = any(stage.options["obs_with_env"] for stage in game.plan.stages if stage.kind == "env")
        _observe(episode, seen.texts if shows else "", seen.info, game.plan.entry, set(_agents(game)))
    stages = {stage.node: stage for stage in game.plan.stages}
    node, acted = game.plan.entry, 0
    while node is not None and not episode.done:
        stage = stages[node]
        episode.visits[node] = episode.visits.get(node, 0) + 1
        if stage.kind == "env":
            acted = await _act(game, stage, played, acted)
        else:
            await _speak(game.speakers[node], stage, played)
        if not episode.done:
            node = _next(game, stage, episode)


async def _speak(speaker: Speaker, stage: StagePlan, played: Played) -> None:
    """One turn of an agent; more, as long as it calls tools."""
    episode = played.episode
    context = played.contexts.setdefault(stage.agent, Context(speaker.renderer, speaker.limits))
    view = _view(episode, stage.agent, context)
    given = not episode.turns and len(view) == len(episode.task["raw_prompt"]) and speaker.tools is None
    known = played.prompt_ids if given else None
    if speaker.pre_process is not None:
        view, known = _called("pre_process", stage, speaker.pre_process, view, episode), None
        if not _is_chat(view):
            raise RolloutError(
                f"node {stage.node!r}: pre_process gave {view!r:.200}, no list of messages with role and "
                "content. Return the messages that the agent shall see."
            )
    turn = await _turn(speaker, stage, episode, context, context.begin(view, known))
    if speaker.tools is None:
        return
    for _ in range(speaker.tools.most_rounds):
        answers = await speaker.tools.answer(turn, context.texts[turn.turn or 0], episode)
        if not answers:
            return
        episode.messages += answers
        more = [{"role": message.role, "content": message.content} for message in answers]
        turn = await _turn(speaker, stage, episode, context, context.begin([*context.shown, *more]))


async def _turn(
    speaker: Speaker, stage: StagePlan, episode: Episode, context: Context, begun: tuple[list[int], int]
) -> Message:
    """Generate after what the context has begun with, and add it to the episode."""
    tokens, room = begun
    turn, episode.turns = episode.turns, episode.turns + 1
    params = replace(speaker.params, max_tokens=min(room, speaker.params.max_tokens))
    generated = await speaker.policy.generate(tokens, params, turn_seed(episode.seed, stage.agent, turn))
    text = context.speak(generated, turn)
    if speaker.post_process is not None:
        text = _called("post_process", stage, speaker.post_process, text, episode)
        if not isinstance(text, str):
            raise RolloutError(f"node {stage.node!r}: post_process gave {text!r:.200}, which is no text.")
    info = {"weight_version": generated.weight_version, "finish_reason": generated.finish_reason}
    info["tokens"] = len(generated.token_ids)
    message = Message("assistant", text, stage.agent, stage.node, turn, info=info)
    episode.messages.append(message)
    return message


async def _act(game: Game, stage: StagePlan, played: Played, acted: int) -> int:
    """Give the environment what was said since `acted`, a count of messages; returns the new count."""
    episode = played.episode
    said = [message for message in episode.messages[acted:] if message.agent is not None]
    actions = {message.agent: message.content for message in said if message.agent is not None}
    result: StepResult = await step_env(episode.env, actions, game.env_deadline_s)
    rewards = result.rewards if stage.options["rewards_with_env"] else {}
    shares = rewards if isinstance(rewards, dict) else dict.fromkeys(actions, rewards)
    for agent, value in shares.items():
        last = episode.last_turn(agent)
        if last is not None and last.turn is not None:
            last.reward += value
            played.contexts[agent].reward(last.turn, value)
    shown = result.observations if stage.options["obs_with_env"] else ""
    _observe(episode, shown, result.info, stage.node, set(_agents(game)))
    episode.done = result.done
    return len(episode.messages)


def _observe(episode: Episode, texts: Texts, info: dict[str, Any], node: str, agents: set[int]) -> None:
    """Add what an environment shows; info of its latest answer is in state["env"]."""
    episode.state["env"] = info
    if isinstance(texts, str):
        if texts:
            episode.messages.append(Message("user", texts, node=node))
        return
    for agent, text in texts.items():
        if text and agent in agents:
            episode.messages.append(Message("user", text, node=node, to=agent))


def _agents(game: Game) -> list[int]:
    return [stage.agent for stage in game.plan.stages if stage.kind == "agent"]


def _next(game: Game, stage: StagePlan, episode: Episode) -> str | None:
    """Where an episode goes after a stage; None: it ends."""
    again = stage.back_to is not None and episode.visits[stage.node] < stage.max_turns
    if again and stage.until is not None:
        again = not _called("until", stage, game.functions[stage.until], episode)
    if stage.route is None:
        return stage.back_to if again else stage.following
    order = [other.node for other in game.plan.stages]
    target = _called("route", stage, game.functions[stage.route], episode)
    if target is not None and target not in order:
        raise RolloutError(
            f"node {stage.node!r}: route {stage.route} gave {target!r}, which is no node of its interaction "
            f"({', '.join(order)}). Return one of these, or None to end the episode."
        )
    if target is None or order.index(target) > order.index(stage.node):
        return target
    if stage.back_to is None:
        raise RolloutError(
            f"node {stage.node!r}: route {stage.route} gave {target!r}, which comes before it: without a "
            "bound the episode might never end. Give the node loop: {max_turns: N}."
        )
    return target if again else stage.following


def _called(name: str, stage: StagePlan, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of the workflow's author returns; what it raises ends the run, with the node."""
    try:
        return function(*arguments)
    except EpisodeFailed:
        raise
    except Exception as error:  # the edge to user code
        raise RolloutError(
            f"node {stage.node!r}: {name} raised {type(error).__name__}: {error}. Correct it; to drop an "
            "episode on purpose, raise siirl.errors.EpisodeFailed."
        ) from error


def _view(episode: Episode, agent: int, context: Context) -> Chat:
    """The conversation as an agent sees it: its own turns as it said them, those of others as the user's."""
    view: Chat = []
    for message in episode.messages:
        if message.to not in (None, agent):
            continue
        if message.agent is None:
            view.append({"role": message.role, "content": message.content})
        elif message.agent == agent:
            view.append({"role": "assistant", "content": context.texts[message.turn or 0]})
        else:
            view.append({"role": "user", "content": message.content})
    return view


def _message(message: dict[str, Any]) -> Message:
    return Message(message["role"], message["content"])


def _is_chat(view: Any) -> bool:
    if not isinstance(view, list) or not view:
        return False
    return all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in view)


def turn_seed(episode_seed: int, agent: int, turn: int) -> int:
    """A 63-bit seed of one turn, wherever it is generated."""
    text = f"{episode_seed}/{agent}/{turn}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
