"""The op of a teacher on a rollout engine, or behind a service, that says how likely the tokens of whole rows
are."""

import torch
from tensordict import TensorDict
from torch import Tensor

from siirl.engines.rollout.base import RolloutEngine
from siirl.engines.weights.target import load_stored
from siirl.nodes.context import OpContext
from siirl.nodes.own_tokens import OwnTokens
from siirl.nodes.teacher_rows import said_of_taken
from siirl.nodes.teacher_service import TeacherService


def teacher_scores(
    ctx: OpContext,
    rows: TensorDict,
    engine: RolloutEngine | None = None,
    teacher_service: TeacherService | None = None,
    own_tokens: OwnTokens | None = None,
) -> TensorDict:
    """As teacher_log_prob. Collective over the ranks of the engine's shard, which answer alike.

    Its weights, which stay what they are, are read from the model's directory the first time.
    """
    scorer = teacher_service or engine
    assert scorer is not None
    if engine is not None:
        load_stored(engine, ctx.cfg.teacher.model.path)
    return said_of_taken(
        ctx, rows, lambda mine, outputs: _scores(scorer, mine, ctx.cfg.teacher.top_k), own_tokens
    )


def _scores(engine: RolloutEngine | TeacherService, rows: TensorDict, top_k: int) -> dict[str, Tensor]:
    """log_prob [B, T] of the sampled tokens, top_log_prob and top_ids [B, T, K] of the K likeliest."""
    response_BT, width = rows["response_ids"], rows["prompt_ids"].shape[1]
    lengths = list(zip(rows["prompt_length"].tolist(), rows["response_length"].tolist(), strict=True))
    tokens = torch.cat([rows["prompt_ids"], response_BT], dim=1).tolist()
    answered = [row for row, (_, response) in enumerate(lengths) if response]
    asked = [tokens[row][width - lengths[row][0] : width + lengths[row][1]] for row in answered]
    scored = engine.score(asked, [lengths[row][0] for row in answered], top_k)
    log_prob_BT = torch.zeros(response_BT.shape, device=response_BT.device)
    top_BTK = log_prob_BT.new_zeros(*response_BT.shape, top_k)
    ids_BTK = torch.zeros(top_BTK.shape, dtype=torch.int64, device=response_BT.device)
    for row, (ids_TK, log_prob_TK) in zip(answered, scored, strict=True):
        length = lengths[row][1]
        log_prob_BT[row, :length] = log_prob_TK[:, 0]
        top_BTK[row, :length], ids_BTK[row, :length] = log_prob_TK[:, 1:], ids_TK[:, 1:]
    return {"log_prob": log_prob_BT, "top_log_prob": top_BTK, "top_ids": ids_BTK}
