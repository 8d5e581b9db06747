"""The rollout op of responses that the dataset gives: rollout.name=dataset."""

import torch
from tensordict import TensorDict

from siirl.data.rows import objects, pad_stack
from siirl.nodes.context import OpContext
from siirl.nodes.generate import report, samples_of
from siirl.types import FIELDS, FINISH_LENGTH, FINISH_STOP


def dataset_rollout(ctx: OpContext, rows: TensorDict) -> TensorDict:
    """One row for each response of a prompt, in the order of data.response_keys. No communication.

    All its tokens are trained; score, if there are several: 0 of the last column, 1 of the one before, ...
    """
    num, width = len(ctx.cfg.data.response_keys), ctx.cfg.data.max_response_length
    responses = [ids for given in objects(rows, "given_responses") for ids in given]
    lengths = torch.tensor([len(ids) for ids in responses], dtype=torch.int64)
    whole = [ids[-1] in ctx.dialect.stop_ids for ids in responses]
    columns = {
        "response_ids": pad_stack(responses, FIELDS["response_ids"]),
        "response_length": lengths,
        "response_mask": torch.arange(int(lengths.max()) if len(lengths) else 0) < lengths[:, None],
        "finish_reason": torch.tensor([FINISH_STOP if x else FINISH_LENGTH for x in whole], dtype=torch.int8),
    }
    out = samples_of(rows.exclude("given_responses"), num, columns)
    if num > 1:
        out["score"] = torch.arange(num - 1, -1, -1).repeat(len(rows)).float()
    report(ctx, out, width)
    return out
