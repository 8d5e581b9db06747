"""The context of one call of an op, without a worker."""

from typing import Any

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from siirl.compiler.plan import NodePlan
from siirl.config import Config
from siirl.nodes.context import DataGroup, LocalNode, OpContext, Samples, StepInfo
from siirl.observe.metrics import Metrics

FIRST_STEP = StepInfo(1, False)


def op_context(
    node_id: str,
    cfg: Config,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    now: StepInfo = FIRST_STEP,
    is_shard_leader: bool = True,
    state: dict[str, float] | None = None,
    options: dict[str, Any] | None = None,
    writes: tuple[str, ...] = ("score", "reward_info"),
) -> OpContext:
    """A call of a node of agent 0 in step 1, which shows no rows."""
    plan = NodePlan(node_id, 0, (), "custom", None, None, {}, options or {})
    node = LocalNode(plan, cfg, tokenizer, {} if state is None else state)
    return OpContext(node, now, DataGroup(group, is_shard_leader), Metrics(), Samples([], 0, []), writes)
