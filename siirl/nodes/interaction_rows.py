"""What episodes are to later nodes: the rows of each agent, and the numbers that a step reports of them."""

from collections.abc import Iterator
from typing import Any

from tensordict import TensorDict

from siirl.agents.contexts import TokenSequence
from siirl.agents.episode import Episode
from siirl.agents.policy import ENDED
from siirl.agents.runner import Played
from siirl.agents.shown import as_written
from siirl.compiler.plan import InteractionPlan, PoolPlan
from siirl.data.rows import make_rows
from siirl.nodes.context import OpContext
from siirl.observe.metrics import MOST_TURNS, Metrics
from siirl.types import (
    BRANCH_FIELDS,
    FINISH_LENGTH,
    FINISH_STOP,
    IMAGE_FIELDS,
    INTERACTION_FIELDS,
    PROMPT_FIELDS,
    ROLLOUT_FIELDS,
)


def rows_of(
    plan: InteractionPlan, policy: int, played: list[Played], prompts: TensorDict, n: int
) -> TensorDict:
    """The rows of all that speak with a policy: PROMPT_FIELDS, ROLLOUT_FIELDS and INTERACTION_FIELDS.

    row_id: episode_id * rows of an episode + rows of earlier speakers at most + number of the row.
    """
    num_speakers = sum(stage.policy == policy for stage in plan.speaking)
    sources = {int(group): index for index, group in enumerate(prompts["group_id"].tolist())}
    samples = prompts["sample_index"].tolist()
    more = IMAGE_FIELDS if "images" in prompts.keys() else ()
    more += BRANCH_FIELDS if plan.branching else ()
    columns: dict[str, list[Any]] = {
        name: [] for name in (*PROMPT_FIELDS, *ROLLOUT_FIELDS, *INTERACTION_FIELDS, *more)
    }
    shown = {one.episode.episode_id: one.episode.conversation() for one in played}
    branches = {one.episode.episode_id: one.branch for one in played}
    for episode, position, speaker, number, row in spoken_rows(plan, policy, played):
        conversation = shown[episode.episode_id]
        values = {
            "row_id": (episode.episode_id * num_speakers + position) * plan.most_turns + number,
            "group_id": episode.group_id,
            "sample_index": samples[sources[episode.group_id]],
            "prompt_ids": row.prompt_ids,
            "prompt_length": len(row.prompt_ids),
            "raw_prompt": as_written(row.messages),
            "data_source": episode.task["data_source"],
            "ground_truth": episode.task["ground_truth"],
            "extra_info": {
                **(episode.task["extra_info"] or {}),
                "agent": speaker,
                "episode_id": episode.episode_id,
                "conversation": conversation,
                "ended": episode.ended,
            },
            "response_ids": row.ids,
            "response_length": len(row.ids),
            "response_mask": row.assistant_mask,
            "finish_reason": FINISH_STOP if row.finish_reason in ENDED else FINISH_LENGTH,
            "weight_version": row.versions,
            "rollout_log_prob": row.log_probs,
            "episode_id": episode.episode_id,
            "speaker": speaker,
            "turn_id": row.turn_ids,
            "branch_id": [branches[episode.episode_id].branch_id(turn) for turn in row.turn_ids],
            "env_reward": row.rewards,
            "conversation": conversation,
            "images": list(row.seen.images),
            "image_starts": list(row.seen.starts),
        }
        for name, column in columns.items():
            column.append(values[name])
    return make_rows(columns)


def spoken_rows(
    plan: InteractionPlan, policy: int, played: list[Played]
) -> Iterator[tuple[Episode, int, int, int, TokenSequence]]:
    """The rows of a policy: episode, place of the speaker among those of the policy, speaker, number, row."""
    speakers = [stage.agent for stage in plan.speaking if stage.policy == policy]
    for one in played:
        for position, speaker in enumerate(speakers):
            context = one.contexts.get(speaker)
            for number, row in enumerate(context.rows) if context else ():
                yield one.episode, position, speaker, number, row


def results_of(plan: InteractionPlan, pool: PoolPlan, finished: list[Played]) -> tuple[float, float]:
    """(won, played) by a policy in training against its opponent: the games in which both have spoken.

    What the environment gave the policy's agents: more than nothing is a win, nothing is half a one.
    """
    sides = {stage.agent for stage in plan.speaking if stage.policy == pool.policy}
    won = played = 0.0
    for one in finished:
        spoken = [message for message in one.episode.messages if message.turn is not None]
        who = {message.agent for message in spoken}
        if pool.agent in who and not sides.isdisjoint(who):
            earned = sum(message.reward for message in spoken if message.agent in sides)
            won, played = won + (earned > 0) + 0.5 * (earned == 0), played + 1
    return won, played


def report_episodes(
    ctx: OpContext, plan: InteractionPlan, played: list[Played], finished: list[Played]
) -> None:
    """Numbers of the episodes, of each node's turns, and of the first turns of the episode."""
    metrics = Metrics()
    metrics.sum("interaction/episodes", len(played))
    metrics.mean("interaction/failed", len(played) - len(finished), len(played))
    for one in played:
        if one.kind is not None:
            metrics.sum(f"interaction/failed/{one.kind}", 1)
        if one.num_left:
            metrics.sum("interaction/left", one.num_left)
    for one in finished:
        num_turns = sum(message.turn is not None for message in one.episode.messages)
        metrics.mean("interaction/turns", num_turns)
        metrics.max("interaction/turns_max", num_turns)
        metrics.mean("interaction/context_full", one.full)
        metrics.mean("interaction/env_done", one.episode.done)
        metrics.mean("interaction/env_reward", sum(message.reward for message in one.episode.messages))
        _report_turns(metrics, one)
        if plan.branching:
            metrics.sum("interaction/branches", one.branch.number > 0)
        for stage in plan.speaking:
            spoken = [message for message in one.episode.messages if message.turn is not None]
            count = sum(message.node == stage.node for message in spoken)
            metrics.mean(f"interaction/{stage.node}/turns", count)
        for agent, context in one.contexts.items():
            metrics.mean(f"interaction/agent_{agent}/rows", len(context.rows))
            metrics.mean(f"interaction/agent_{agent}/cut_messages", context.num_truncated)
            if context.num_rewritten:
                metrics.sum("interaction/rewritten_rows", context.num_rewritten)
    ctx.metrics.merge(metrics, "val/" if ctx.validate else "")


def _report_turns(metrics: Metrics, one: Played) -> None:
    for message in one.episode.messages:
        if message.turn is None or message.turn < one.branch.begins:
            continue
        for name in (message.node, f"turn_{min(message.turn, MOST_TURNS)}"):
            metrics.mean(f"interaction/{name}/length", message.info["tokens"])
            metrics.mean(f"interaction/{name}/finished", message.info["finish_reason"] in ENDED)
            metrics.mean(f"interaction/{name}/env_reward", message.reward)
        if "tool_calls" in message.info:
            for where in ("interaction", f"interaction/{message.node}"):
                metrics.sum(f"{where}/tool_calls", message.info["tool_calls"])
                metrics.sum(f"{where}/tool_errors", len(message.info["tool_errors"]))
        for kind in message.info.get("tool_errors", ()):
            metrics.sum(f"interaction/tool_errors/{kind}", 1)
