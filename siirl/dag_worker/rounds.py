"""How many groups a node that repeats what is above it still lacks: what all ranks of a Repeat agree on."""

import torch
import torch.distributed as dist

from siirl.compiler.plan_instructions import Repeat
from siirl.config.batch import batch_of
from siirl.dag_worker.worker import DAGWorker
from siirl.errors import DataError, SamplingError
from siirl.observe.spans import waiting


def groups_wanted(worker: DAGWorker, ins: Repeat, num_rounds: int, num_sampled: int) -> int:
    """How many groups the next round is for; 0: the batch is full.

    num_rounds, num_sampled: the rounds of this step so far, and the groups that they were for. With
    rollout.max_lag a round gives exactly so many, at most max_num_gen_batches batches in a step, and
    nothing is left over for the next one. Collective over ins.ranks; all of them get the same answer.
    SamplingError, on all of them, when the batch is not full and no round is left.
    """
    cfg, batch = worker.node_cfg(ins.node), batch_of(worker.node_cfg(ins.node))
    num_kept, needed, agent = _num_kept(worker, ins), batch.prompts, worker.plan.nodes[ins.node].agent
    max_lag = max(node.max_lag for node in worker.plan.nodes.values() if node.agent == agent)
    if max_lag and num_kept and not num_rounds:
        raise DataError(
            f"the checkpoint holds {num_kept} groups that node {ins.node!r} left over in a run without "
            f"staleness: how old they are is not known, and rollout.max_lag={max_lag} bounds it. Resume with "
            "max_lag=0, or start over with trainer.resume_mode=disable."
        )
    assert num_kept <= needed or not max_lag, f"{num_kept - needed} groups would wait in node {ins.node!r}"
    if num_kept >= needed:
        return 0
    most = cfg.algorithm.filter_groups.max_num_gen_batches * batch.generated
    sampled = num_sampled if max_lag else num_rounds * batch.generated
    if most and sampled >= most:
        raise SamplingError(
            f"node {ins.node!r}: of {sampled} prompts in {num_rounds} rounds only {num_kept} have responses "
            f"whose {cfg.algorithm.filter_groups.metric} differs, and a step needs {needed} "
            "(data.train_batch_size): the prompts are too easy or too hard for this policy, or the "
            "reward is constant. Raise algorithm.filter_groups.max_num_gen_batches, data.gen_batch_size or "
            "actor_rollout_ref.rollout.n, or choose other prompts."
        )
    return min(needed - num_kept, most - sampled) if most and max_lag else needed - num_kept


def _num_kept(worker: DAGWorker, ins: Repeat) -> int:
    """The groups that the node keeps, over all its ranks. Collective over ins.ranks."""
    layout, mine = worker.plan.layouts[worker.plan.run_of(ins.node).source], 0.0
    if worker.rank in layout.ranks:  # ranks of one shard keep the same groups
        copies = layout.shards.count(layout.shard_of(worker.rank))
        mine = len(worker.nodes[ins.node].buffer.orders()) / copies
    kept = torch.tensor([mine], dtype=torch.float64)
    with waiting():
        dist.all_reduce(kept, group=worker.groups.get(ins.ranks))
    return round(kept.item())
