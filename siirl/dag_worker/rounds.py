"""Whether a node that repeats what is above it needs another round: what all ranks of a Repeat agree on."""

import torch
import torch.distributed as dist

from siirl.compiler.plan import Repeat
from siirl.dag_worker.worker import DAGWorker
from siirl.errors import SamplingError


def needs_round(worker: DAGWorker, ins: Repeat, num_rounds: int) -> bool:
    """Whether the batch of a node is not full yet, after so many rounds of this step.

    Collective over ins.ranks; all of them get the same answer. SamplingError, on all of them, when the batch
    is not full and no round is left.
    """
    cfg, layout = worker.node_cfg(ins.node), worker.plan.layouts[worker.plan.run_of(ins.node).source]
    mine = 0.0
    if worker.rank in layout.ranks:  # ranks of one shard keep the same groups
        copies = layout.shards.count(layout.shard_of(worker.rank))
        mine = len(worker.nodes[ins.node].buffer.orders()) / copies
    kept = torch.tensor([mine], dtype=torch.float64)
    dist.all_reduce(kept, group=worker.groups.get(ins.ranks))
    num_kept, needed = round(kept.item()), cfg.data.train_batch_size
    if num_kept >= needed:
        return False
    filters = cfg.algorithm.filter_groups
    if filters.max_num_gen_batches and num_rounds >= filters.max_num_gen_batches:
        raise SamplingError(
            f"node {ins.node!r}: after {num_rounds} rounds of {cfg.data.gen_batch_size or needed} prompts "
            f"only {num_kept} prompts have responses whose {filters.metric} differs, and a step needs "
            f"{needed} (data.train_batch_size): the prompts are too easy or too hard for this policy, or the "
            "reward is constant. Raise algorithm.filter_groups.max_num_gen_batches, data.gen_batch_size or "
            "actor_rollout_ref.rollout.n, or choose other prompts."
        )
    return True
