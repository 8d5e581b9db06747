"""Teachers: what frozen models say of the rows that they take, and what the policy learns of each row."""

from collections.abc import Callable

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import pad

from siirl.algorithms.distillation import mixture
from siirl.config.teacher import SAMPLED, WHOLE
from siirl.dag.fields_read import OF_TEACHER, Names, teacher_outputs
from siirl.data.row_values import value_at
from siirl.data.rows import objects, take_rows, widened
from siirl.engines.train.base import TrainEngine
from siirl.errors import DataError
from siirl.nodes.context import OpContext
from siirl.nodes.own_tokens import OwnTokens

WEIGHT = f"{OF_TEACHER}weight"


def teacher_log_prob(
    ctx: OpContext, rows: TensorDict, engine: TrainEngine, own_tokens: OwnTokens | None = None
) -> TensorDict:
    """What the teacher says of the tokens of the rows that it takes, zeros in all others, and its weight.

    Fields are named by the node. Collective over the model's ranks.
    """

    def compute(mine: TensorDict, outputs: Names) -> TensorDict:
        ctx.metrics.sum("flops/forward", engine.flops(mine, backward=False))
        return engine.compute(mine, outputs, ctx.cfg.actor_rollout_ref.rollout.trained_temperature)

    return said_of_taken(ctx, rows, compute, own_tokens)


def said_of_taken(
    ctx: OpContext,
    rows: TensorDict,
    compute: Callable[[TensorDict, Names], TensorDict | dict[str, Tensor]],
    own_tokens: OwnTokens | None,
) -> TensorDict:
    """The fields of a teacher: what `compute` gives of the rows that it takes, by the names of outputs."""
    teacher = ctx.cfg.teacher
    taken_B = _taken(ctx, rows)
    mine = take_rows(rows, taken_B)
    outputs = teacher_outputs(teacher)
    found = compute(mine, outputs) if own_tokens is None else own_tokens.said(mine, compute, ctx.metrics)
    columns = {"weight": torch.where(taken_B, teacher.weight, 0.0)}
    for name in outputs:
        columns[name] = found[name]
        if not bool(taken_B.all()):
            columns[name] = found[name].new_zeros(len(rows), *found[name].shape[1:])
            columns[name][taken_B] = found.pop(name)
    return TensorDict(
        {f"{ctx.node_id}{OF_TEACHER}{name}": column for name, column in columns.items()},
        batch_size=rows.batch_size,
    )


def _taken(ctx: OpContext, rows: TensorDict) -> Tensor:
    """Which rows the teacher takes, bool [B]."""
    teacher, device = ctx.cfg.teacher, rows["response_ids"].device
    if not teacher.takes:
        return torch.ones(len(rows), dtype=torch.bool, device=device)
    field, _, path = teacher.by.partition(".")
    values = [value_at(value, path) for value in objects(rows, field)]
    return torch.tensor([str(value) in teacher.takes for value in values], dtype=torch.bool, device=device)


def taught(ctx: OpContext, rows: TensorDict) -> TensorDict:
    """The rows with what their teachers say together, in the place of what each of them says.

    teacher_log_prob [B, T] of the sampled tokens, or with a teacher of another tokenizer of the spans
    teacher_span [B, T]; or teacher_top_log_prob [B, T, K] of the tokens top_ids [B, T, K], or of all, at the
    first of each span.
    DataError for a row that no teacher takes.
    """
    distill = ctx.cfg.actor_rollout_ref.actor.distill
    names = [name.removesuffix(WEIGHT) for name in rows.keys() if name.endswith(WEIGHT)]
    weight_MB = torch.stack([rows[f"{name}{WEIGHT}"] for name in names])
    _check_all_taken(ctx, rows, weight_MB)

    first_B, row_B = (weight_MB > 0).int().argmax(0), torch.arange(len(rows))
    each_BT = torch.arange(1, rows["response_ids"].shape[1] + 1).expand(len(rows), -1)

    def of_all(output: str) -> list[Tensor]:
        """Of each teacher; the span of a token that is compared alone is itself."""
        columns = [f"{name}{OF_TEACHER}{output}" for name in names]
        return [widened(rows.get(column, each_BT), column, each_BT.shape[1]) for column in columns]

    def of_its_teacher(output: str) -> Tensor:
        columns = of_all(output)
        if columns[0].ndim == 3:  # vocabularies differ: what one lacks is never said
            nothing, width = (
                -torch.inf if columns[0].is_floating_point() else 0,
                max(x.shape[2] for x in columns),
            )
            columns = [pad(column, (0, width - column.shape[2]), value=nothing) for column in columns]
        return torch.stack(columns)[first_B, row_B]

    aligned = any(f"{name}{OF_TEACHER}span" in rows.keys() for name in names)
    found = {"teacher_span": of_its_teacher("span")} if aligned else {}
    if distill.top_k == SAMPLED:
        of_rows = of_its_teacher("log_prob") if aligned else mixture(of_all("log_prob"), weight_MB)
        found["teacher_log_prob"] = of_rows
    elif distill.top_k == WHOLE and not aligned:
        found["teacher_top_log_prob"] = mixture(of_all("top_log_prob"), weight_MB)
    else:
        found["teacher_top_log_prob"] = of_its_teacher("top_log_prob")
        if distill.top_k != WHOLE:
            found["top_ids"] = of_its_teacher("top_ids")
    out = rows.exclude(*(name for name in rows.keys() if OF_TEACHER in name))
    for name, column in found.items():
        out[name] = column
    return out


def _check_all_taken(ctx: OpContext, rows: TensorDict, weight_MB: Tensor) -> None:
    lost_B = weight_MB.sum(0) == 0
    if bool(lost_B.any()):
        row = int(lost_B.nonzero()[0])
        raise DataError(
            f"node {ctx.node_id!r}: no teacher takes the row of sample {int(rows['sample_index'][row])}. "
            "Name its value in teacher.takes of one, or let one take all rows."
        )
