"""The rule-based reward op: responses in, scores out, computed beside whatever the DAG lets run meanwhile.

And what every reward op does with its scores: check them, report them, show them.
"""

from collections import defaultdict
from concurrent.futures import Future
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from siirl.algorithms.stats import group_stats, score_stats
from siirl.dag.ops import INFO
from siirl.data.rows import objects, renamed, take_rows
from siirl.data.said import said_in
from siirl.dialect.parts import Said, read_turn
from siirl.dialect.tool_formats import tool_parser
from siirl.errors import DagError, RewardError
from siirl.nodes.context import Op, OpContext
from siirl.nodes.trained_tokens import wanted_rows
from siirl.observe.spans import waiting
from siirl.rewards.scorer import Added, RewardScorer, count_values, no_parts
from siirl.show.conversation_text import CHAT, EPISODE, LENGTH, SAID, TOTAL, WANTED

SPREAD = 2_654_435_761
"""Of Knuth's multiplicative hash: neighbours in a data set come to lie far apart."""


def function_reward(
    ctx: OpContext, rows: TensorDict, scorer: RewardScorer
) -> TensorDict | Future[TensorDict]:
    """score [B] and reward_info [B], or under the node's own name. No communication.

    A Future in training, so that the scorer's processes work while the next nodes run; rows in validation,
    and where nothing follows (trainer.rollout_only).
    """
    if ctx.reward_name != "score":
        return scorer.submit(rows, names=column_names(ctx))
    future = scorer.submit(rows, by_domain=not ctx.validate)
    if not (ctx.validate or ctx.cfg.trainer.rollout_only):
        if ctx.shown.limit and not ctx.shown.told_later:
            ctx.shown.later.append(lambda: show(ctx, rows, future.result()))
        return future
    scored = future.result()
    report_rewards(ctx, rows, scored, scorer.chooser.added)
    return scored


def column_names(ctx: OpContext) -> dict[str, str]:
    """The fields that a reward node writes its score and further values to."""
    if ctx.reward_name == "score":
        return {"score": "score", "reward_info": "reward_info"}
    return {"score": ctx.reward_name, "reward_info": f"{ctx.reward_name}{INFO}"}


def finished(ctx: OpContext, rows: TensorDict, scored: TensorDict, added: Added = no_parts) -> TensorDict:
    """The columns that a reward op gives, checked, counted by domain, and shown to the user.

    A score under a name of its own is not the row's reward yet: the node that adds it up reports it.
    """
    check_scores(ctx, rows, scored["score"])
    if ctx.reward_name != "score":
        return renamed(scored, column_names(ctx))
    if not ctx.validate:
        sources = objects(rows, "data_source")
        for source, score in zip(sources, scored["score"].tolist(), strict=True):
            ctx.metrics.mean(f"reward/{source}/mean", score)
        count_values(ctx.metrics, zip(sources, objects(scored, "reward_info"), strict=True), added)
    report_rewards(ctx, rows, scored, added)
    return scored


def custom_op(function: Op) -> Op:
    """The user's function, which gives what the node writes; of the rows' score each is checked."""

    def run(ctx: OpContext, rows: TensorDict, **needs: Any) -> TensorDict | Future[TensorDict]:
        out = function(ctx, rows, **needs)
        if isinstance(out, Future):
            return out
        if out is None and not ctx.writes:
            return rows
        _check_written(ctx, out)
        if "score" in ctx.writes:
            check_scores(ctx, rows, out["score"])
        return out

    return run


def _check_written(ctx: OpContext, out: Any) -> None:
    """DagError unless what the user's function returned has the fields that its node writes."""
    is_table = isinstance(out, TensorDictBase)
    missing = [name for name in ctx.writes if not is_table or name not in out.keys()]
    if is_table and not missing:
        return
    given = (
        f"a TensorDict with {', '.join(sorted(out.keys())) or 'no field'}" if is_table else repr(type(out))
    )
    fields = ", ".join(f'"{name}": ...' for name in ctx.writes)
    raise DagError(
        f"node {ctx.node_id!r}: {ctx.node.plan.executable} returned {given}, and not "
        f"{', '.join(missing) or 'rows'}, which the node writes. Return "
        f"TensorDict({{{fields}}}, batch_size=rows.batch_size), or correct the node's `writes`."
    )


def report_rewards(ctx: OpContext, rows: TensorDict, scored: TensorDict, added: Added = no_parts) -> None:
    """What the user sees of scores at once: of a validation, of a run that only samples, of sampled rows.

    Where an advantage node adds more up, that tells the reward, and this the score alone.
    """
    if ctx.validate:
        (report_scores if ctx.shown.told_later else report_validation)(ctx, rows, scored)
        sources, infos = objects(rows, "data_source"), objects(scored, "reward_info")
        count_values(ctx.metrics, zip(sources, infos, strict=True), added, validate=True)
    elif ctx.cfg.trainer.rollout_only:
        report_groups(ctx, rows, scored)
    if not ctx.shown.told_later:
        show(ctx, rows, scored)


def check_scores(ctx: OpContext, rows: TensorDict, score_B: Tensor, name: str = "") -> None:
    """RewardError, with the sample's index, unless there is one finite score for each row.

    name: the field that holds them, if it is not the node's own.
    """
    whose = f"node {ctx.node_id!r} reads {name!r}, which" if name else f"node {ctx.node_id!r}"
    if score_B.shape != (len(rows),):
        raise RewardError(
            f"{whose} gave scores of shape {list(score_B.shape)} for {len(rows)} responses: one for each is "
            "needed. Correct the model or the node's code."
        )
    wrong = (~torch.isfinite(score_B.float())).nonzero().flatten().tolist()
    if wrong:
        first = wrong[0]
        raise RewardError(
            f"{whose} scored {len(wrong)} of {len(rows)} responses with a number that is not finite in "
            f"float32, first {_sample(rows, first)} with {float(score_B[first])}: nothing can be learnt from "
            "that. Correct the node's code, or the reward model's weights and number types (param_dtype)."
        )


def _sample(rows: TensorDict, row: int) -> str:
    """How a message names a row, by what is known of it."""
    if "sample_index" in rows.keys():
        source = (
            f" (data_source {objects(rows, 'data_source')[row]!r})" if "data_source" in rows.keys() else ""
        )
        return f"sample_index {int(rows['sample_index'][row])}{source}"
    return f"row_id {int(rows['row_id'][row])}" if "row_id" in rows.keys() else f"row {row}"


def report_scores(ctx: OpContext, rows: TensorDict, scored: TensorDict) -> None:
    """Of a validation, the mean score, which is not all that rows get."""
    ctx.metrics.mean("val/score/mean", float(scored["score"].sum()), len(rows))


def report_validation(ctx: OpContext, rows: TensorDict, scored: TensorDict) -> None:
    """Mean reward, over all and by data source; with several samples also the mean of each prompt's best.

    Communicates over ctx.group for the latter, if a prompt's samples are on several ranks.
    """
    scores, sources = scored["score"].tolist(), objects(rows, "data_source")
    for score, source, episode in zip(scores, sources, _episodes(rows), strict=True):
        ctx.metrics.mean("val/reward/mean", score)
        ctx.metrics.mean(f"val/{source}/reward/mean", score)
        if episode is not None:
            ctx.metrics.mean(f"val/speaker_{episode['agent']}/reward/mean", score)
    n = ctx.cfg.actor_rollout_ref.rollout.val_kwargs.n
    if n > 1:
        best: dict[tuple[int, str], float] = defaultdict(lambda: float("-inf"))
        for prompt, source, score in _by_prompt(ctx, rows, scored):
            key = (prompt, source)
            best[key] = max(best[key], score)
        for (_, source), score in best.items():
            ctx.metrics.mean(f"val/{source}/reward/best_of_{n}", score)


def _by_prompt(ctx: OpContext, rows: TensorDict, scored: TensorDict) -> list[tuple[int, str, float]]:
    """Prompt, data source and score of rows: this rank's, if it has all samples of their prompts; else those
    of all ranks on the first one, and none on the others. Collective over ctx.group in the second case."""
    columns = (rows["sample_index"].tolist(), objects(rows, "data_source"), scored["score"].tolist())
    mine = list(zip(*columns, strict=True))
    if ctx.peers.has_whole_groups:
        return mine
    parts: list[Any] = [None] * dist.get_world_size(ctx.group)
    with waiting():
        dist.all_gather_object(parts, mine if ctx.is_shard_leader else [], group=ctx.group)
    return [row for part in parts for row in part] if dist.get_rank(ctx.group) == 0 else []


def report_groups(ctx: OpContext, rows: TensorDict, scored: TensorDict) -> None:
    """The scores, and those of the samples of each prompt, which the advantage op reports in training.

    Communicates over ctx.group if a prompt's samples are on several ranks.
    """
    found = _by_prompt(ctx, rows, scored)
    prompt_B = torch.tensor([prompt for prompt, _, _ in found], dtype=torch.int64)
    ctx.metrics.merge(group_stats(torch.tensor([score for *_, score in found]), prompt_B), "reward/")
    ctx.metrics.merge(score_stats(scored["score"]), "reward/")


def show(ctx: OpContext, rows: TensorDict, scored: TensorDict, reward_B: Tensor | None = None) -> None:
    """Put some rows into ctx.shown.rows, as text; of an interaction, all of as many episodes.

    In training all samples of some prompts, as many prompts as have shown.limit samples; in validation so
    many samples of as many prompts as there are: the first of each, then the second ones. scored: score and
    reward_info, as far as there are any. reward_B: what the rows get in all, if that is not the score.
    """
    apart = not ctx.validate and not ctx.peers.has_whole_groups
    picked = _shown(rows, _episodes(rows), ctx.shown.limit, whole_groups=not ctx.validate, apart=apart)
    if not len(picked):
        return
    totals = [{}] * len(picked) if reward_B is None else [{TOTAL: float(reward_B[row])} for row in picked]
    rows, scored = take_rows(rows, picked), take_rows(scored, picked)  # reading an element is slow
    names = ("data_source", "raw_prompt", "ground_truth")
    infos = objects(scored, "reward_info") if "reward_info" in scored.keys() else [{}] * len(rows)
    episodes = _episodes(rows)
    wanted = [] if ctx.trained is None else wanted_rows(ctx.agent, rows, episodes)
    columns = zip(episodes, infos, _parts(ctx, rows), *(objects(rows, x) for x in names), strict=True)
    for index, (extra, info, parts, source, prompt, truth) in enumerate(columns):
        length = int(rows["response_length"][index])
        response = ctx.tokenizer.decode(rows["response_ids"][index, :length], skip_special_tokens=False)
        episode = {}
        if extra is not None:
            names = ("agent", "episode_id", "conversation", "ended")
            turn = int(rows["turn_id"][index].max()) if "turn_id" in rows.keys() else None
            about = {name: extra.get(name, "") for name in names}
            episode = {EPISODE: {**about, "turn": turn, **({SAID: parts} if parts else {})}}
        elif parts:
            episode = {SAID: parts}
        recorded = {} if ctx.trained is None else {WANTED: wanted[index]}
        ctx.shown.rows.append(
            {
                **episode,
                "node": ctx.node_id,
                "data_source": source,
                "sample_index": int(rows["sample_index"][index]),
                **({} if ctx.trained is None else {"row_id": int(rows["row_id"][index])}),
                **({"score": float(scored["score"][index])} if "score" in scored.keys() else {}),
                **(info or {}),
                **totals[index],
                LENGTH: length,
                CHAT: {"agent": ctx.agent, "prompt": as_messages(prompt), **recorded},
                "prompt": as_text(prompt),
                "response": response,
                "ground_truth": str(truth),
            }
        )


def _parts(ctx: OpContext, rows: TensorDict) -> list[Any]:
    """What was said in each row, taken apart, where it has reasoning or calls: {reasoning, answer, calls}, of
    an interaction by the turns of the agent; else None.
    """
    multi_turn = ctx.cfg.actor_rollout_ref.rollout.multi_turn
    parse = tool_parser(multi_turn.format, dialect=ctx.dialect.tool_format) if multi_turn.enable else None
    if ctx.dialect.reasoning is None and parse is None:
        return [None] * len(rows)
    episodes = _episodes(rows)
    if not any(episodes):
        return [_told(said) for said in said_in(rows, ctx.tokenizer, ctx.dialect)]
    found: list[Any] = []
    for extra in episodes:
        turns = [one for one in (extra or {}).get("conversation", ()) if one.get("agent") == ctx.agent]
        said = {
            one["turn"]: _told(read_turn(ctx.dialect, str(one["content"]), ctx.dialect.opens, parse))
            for one in turns
        }
        found.append({turn: parts for turn, parts in said.items() if parts} or None)
    return found


def _told(said: Said) -> dict[str, Any] | None:
    """The parts of a turn that has more than an answer."""
    if said.reasoning is None and not said.calls:
        return None
    return {name: value for name, value in said.as_dict().items() if name in ("reasoning", "answer", "calls")}


def _shown(
    rows: TensorDict,
    episodes: list[dict[str, Any] | None],
    limit: int,
    whole_groups: bool = False,
    apart: bool = False,
) -> list[int]:
    """The rows to be shown, in their order: all of `limit` samples (-1: of all).

    whole_groups: all samples of some prompts. apart: other ranks have samples of them, too, so those are
    taken that every rank would take.
    """
    samples: dict[tuple[Any, ...], list[Any]] = defaultdict(list)  # prompt -> its samples
    sample_of: list[tuple[tuple[Any, ...], Any]] = []
    prompts = zip(objects(rows, "data_source"), rows["sample_index"].tolist(), strict=True)
    for index, (prompt, extra) in enumerate(zip(prompts, episodes, strict=True)):
        sample = index if extra is None else extra["episode_id"]
        if sample not in samples[prompt]:
            samples[prompt].append(sample)
        sample_of.append((prompt, sample))
    if limit < 0:
        return list(range(len(rows)))
    if whole_groups:
        prompts = sorted(samples, key=lambda prompt: prompt[1] * SPREAD % 2**32) if apart else list(samples)
        sizes = accumulate((len(samples[prompt]) for prompt in prompts), initial=0)
        kept = {prompt for prompt, before in zip(prompts, sizes, strict=False) if before < limit}
        return [index for index, (prompt, _) in enumerate(sample_of) if prompt in kept]
    turns = max(map(len, samples.values()), default=0)
    ordered = [(prompt, own[n]) for n in range(turns) for prompt, own in samples.items() if n < len(own)]
    taken = set(ordered[:limit])
    return [index for index, sample in enumerate(sample_of) if sample in taken]


def _episodes(rows: TensorDict) -> list[dict[str, Any] | None]:
    """extra_info of the rows of interactions (agent, episode_id, conversation, ended); None for others."""
    extras = objects(rows, "extra_info") if "extra_info" in rows.keys() else [None] * len(rows)
    return [x if isinstance(x, dict) and "conversation" in x else None for x in extras]


def as_text(raw_prompt: Any) -> str:
    """A chat as text: one "role: content" paragraph per message; a plain prompt as it is."""
    if isinstance(raw_prompt, str):
        return raw_prompt
    return "\n".join(f"{message['role']}: {message['content']}" for message in raw_prompt)


def as_messages(raw_prompt: Any) -> list[dict[str, Any]]:
    """A chat as messages of a conversation, each with role and content; a plain prompt is one of a user."""
    if isinstance(raw_prompt, str):
        return [{"role": "user", "content": raw_prompt}]
    return [{"role": message["role"], "content": message["content"]} for message in raw_prompt]
