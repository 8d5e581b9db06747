"""The op that adds up the rewards of several nodes, by weights of each data source."""

from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from siirl.config.reward_weights import RewardWeights, WeightedPart
from siirl.config.roles import normalizes_weights
from siirl.dag.ops import INFO, score_names
from siirl.data.rows import make_rows, objects
from siirl.nodes.context import OpContext
from siirl.nodes.function_reward import check_scores, finished
from siirl.observe.spans import waiting

SMALLEST_STD = 1e-6
Moments = list[float]  # number of scores, their sum, the sum of their squares


def combine_rewards(ctx: OpContext, rows: TensorDict) -> TensorDict:
    """score [B], the weighted sum of the rewards that the node reads, and reward_info [B] with each of them.

    Communicates over ctx.group only where a reward is standardised. RewardError for one that is not finite.
    """
    names = score_names(rows.keys())
    weights = RewardWeights(ctx.cfg.reward_model.weights, names, normalizes_weights(ctx.cfg))
    for name in names:
        check_scores(ctx, rows, rows[name], name)
    sources = objects(rows, "data_source")
    parts = {source: weights.parts(source) for source in dict.fromkeys(sources)}
    moments = _moments(ctx, rows, sources, parts) if _standardizes(ctx) else {}
    score_B = torch.zeros(len(rows), dtype=torch.float64)
    for source, own in parts.items():
        here = torch.tensor([index for index, other in enumerate(sources) if other == source])
        for part in own:
            value_B = rows[part.name][here].double()
            if part.standardize:
                value_B = _standardized(value_B, moments[_key(source, part)])
            score_B[here] += part.scale * value_B + part.offset
    scored = make_rows({"score": score_B.float(), "reward_info": _infos(rows, names)})
    return finished(ctx, rows, scored, lambda source: [part.name for part in parts[source]])


def _infos(rows: TensorDict, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """The rewards of each row as their nodes gave them, and their further values where they are read."""
    infos: list[dict[str, Any]] = [{} for _ in range(len(rows))]
    for name in names:
        more = objects(rows, f"{name}{INFO}") if f"{name}{INFO}" in rows.keys() else [{}] * len(rows)
        for info, score, further in zip(infos, rows[name].tolist(), more, strict=True):
            info[name] = score
            info.update({f"{name}/{key}": value for key, value in (further or {}).items()})
    return infos


def _standardizes(ctx: OpContext) -> bool:
    """Whether any reward is standardised: the same on every rank, whatever rows it has."""
    values = ctx.cfg.reward_model.weights.values()
    options = [part for value in values if isinstance(value, dict) for part in value.values()]
    return any(isinstance(part, dict) and part.get("standardize") for part in options)


def _key(source: str, part: WeightedPart) -> str:
    return f"{source}/{part.name}"


def _moments(
    ctx: OpContext, rows: TensorDict, sources: list[str], parts: dict[str, tuple[WeightedPart, ...]]
) -> dict[str, Moments]:
    """Moments of each standardised reward of each data source: over all training steps, this one included.

    They are the node's state. A validation uses them as they are; before the first step those of its own
    rows. Collective over ctx.group.
    """
    mine: dict[str, Moments] = {}
    for source, own in parts.items():
        here = torch.tensor([other == source for other in sources])
        for part in own:
            if part.standardize:
                value_B = rows[part.name][here].double()
                mine[_key(source, part)] = [
                    float(len(value_B)),
                    float(value_B.sum()),
                    float((value_B**2).sum()),
                ]
    gathered: list[dict[str, Moments]] = [{} for _ in range(dist.get_world_size(ctx.group))]
    with waiting():
        dist.all_gather_object(gathered, mine if ctx.is_shard_leader else {}, group=ctx.group)
    found: dict[str, Moments] = {}
    for key in sorted({key for given in gathered for key in given}):
        before = [ctx.state.get(f"{key}/{index}", 0.0) for index in range(3)]
        now = [sum(given[key][index] for given in gathered if key in given) for index in range(3)]
        if ctx.validate and before[0]:
            now = [0.0] * 3
        found[key] = [one + other for one, other in zip(before, now, strict=True)]
        if not ctx.validate:
            ctx.state.update({f"{key}/{index}": value for index, value in enumerate(found[key])})
    return found


def _standardized(value_B: Tensor, moments: Moments) -> Tensor:
    count, total, squares = moments
    mean = total / count
    std = max(squares / count - mean * mean, 0.0) ** 0.5
    return (value_B - mean) / (std + SMALLEST_STD)
