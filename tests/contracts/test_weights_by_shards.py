"""Weights of real trainers to real engines by shards, through a link: bit for bit what is exported."""

import importlib.util
import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import train_engine_cases as cases
from causal_lms import tiny_config
from causal_lms import write_model as write_causal_lm
from dist_harness import run_workers
from later import needed
from train_engine_cases import Scenario

from siirl.compiler.plan import LinkPlan, ModelPlan
from siirl.config import load_config
from siirl.engines.engine_registry import make_rollout_engine
from siirl.engines.weights import shard_sync
from siirl.engines.weights.link import make_link
from siirl.engines.weights.target import stored_tensors_of
from siirl.parallel.dims import ParallelDims
from siirl.parallel.process_groups import ProcessGroupManager

megatron = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="no megatron-core")
FSDP = Scenario("fsdp", 2)
TP = Scenario("megatron", 2, strategy="megatron", sizes=(("tp", 2),))
EXPERTS = Scenario("megatron experts", 2, strategy="megatron", sizes=(("ep", 2),))
"""On ranks 0 and 1."""
SYNCS = 3


def trainer_on(rank, scenario, folder, ranks):
    """A trainer on ranks 0 and 1, and the groups of a link of all these ranks."""
    _, wanted = cases.dims_of(scenario, (0, 1))
    groups = ProcessGroupManager(list(dict.fromkeys([*wanted, (0, 1), ranks])), "gloo", 200)
    return (cases.make_engine(scenario, folder, groups, (0, 1)) if rank < 2 else None), groups


def move(trainer, version):
    """Other weights, the same on all ranks that have them."""
    for pieces in trainer.held_pieces().values():
        for local, _ in pieces:
            local.mul_(-0.75)
    trainer.version = version


def pushed(trainer, target, groups, ranks, kind, check):
    """Syncs of a link; what each sent from rank to rank, and said of shards. check: of a target's weights."""
    shard_sync.ROUND_BYTES, shard_sync.PART_BYTES = 30000, 5000
    plan = LinkPlan("agent_0.sync", "agent_0.actor", "agent_0.rollout", ranks, kind)
    link = make_link(plan, trainer, target, groups, Path("never"))
    sent, batch, said = [0] * SYNCS, dist.batch_isend_irecv, []
    logging.getLogger("siirl.engines.weights.shard_way").addHandler(Noting(said))
    logging.getLogger("siirl").setLevel(logging.INFO)
    for sync in range(SYNCS):

        def counted(works, sync=sync):
            sent[sync] += sum(work.tensor.nbytes for work in works if work.op is dist.isend)
            return batch(works)

        dist.batch_isend_irecv = counted
        metrics = link.push().values()
        dist.batch_isend_irecv = batch
        box = [None]
        if trainer is not None:
            whole = {name: tensor.clone() for name, tensor in trainer.export_weights(torch.float32)}
            assert metrics["weight_sync/bytes"] == sum(x.nbytes for x in whole.values())
            box = [whole]
        dist.broadcast_object_list(box, src=0)
        if target is not None:
            assert target.weight_version == sync
            check(box[0])
        if trainer is not None and sync + 1 < SYNCS:
            move(trainer, sync + 1)
    return sent, said


class Noting(logging.Handler):
    def __init__(self, said):
        super().__init__()
        self.said = said

    def emit(self, record):
        self.said.append(record.getMessage())


def to_a_whole_engine(rank, world, scenario, folder):
    trainer, groups = trainer_on(rank, scenario, folder, (0, 1, 2))
    target = None
    if rank == 2:
        keys = ("rollout.name=hf", f"model.path={folder}", "rollout.dtype=float32")
        cfg = load_config([f"actor_rollout_ref.{key}" for key in keys])
        plan = ModelPlan("rollout", 0, "rollout", "hf", "lm", False, (2,), ParallelDims(1), "rollout", ())
        target = make_rollout_engine(plan, cfg, None, torch.device("cpu"))

    def check(whole):
        own = stored_tensors_of(target._model)
        for name in target.weight_specs():
            assert torch.equal(own[name], whole[name]), name

    return pushed(trainer, target, groups, (0, 1, 2), "broadcast", check)


@pytest.mark.parametrize(
    ("kind", "scenario"),
    [
        ("qwen3", FSDP),
        *(
            pytest.param(kind, EXPERTS, marks=[megatron, pytest.mark.slow])
            for kind in ("qwen3_moe", "gpt_oss")
        ),
    ],
)
def test_an_engine_on_a_rank_of_its_own_gets_each_row_from_the_trainer_that_has_it(kind, scenario, tmp_path):
    write_causal_lm(tmp_path, tiny_config(kind, hidden_size=128, head_dim=32, tie_word_embeddings=False))
    (first, said), (second, _), _ = run_workers(to_a_whole_engine, 3, scenario, tmp_path, deadline_s=120)
    assert first[0] == second[0] == 0, "the first sync is announced"
    assert 0.6 < first[1] / second[1] < 1.7 and first[2] == first[1]
    assert any("goes by shards" in line for line in said)


def to_a_divided_engine(rank, world, scenario, folder):
    from updated_engines import build, by_loaders, samples
    from worker_shares import check_parameters

    trainer, groups = trainer_on(rank, scenario, folder, (0, 1))
    target = build(folder, groups=groups)

    def check(whole):
        if rank == 0:
            check_parameters(target, whole, folder)

    try:
        sent, said = pushed(trainer, target, groups, (0, 1), "local", check)
        found = samples(target)
        whole = {name: tensor.clone() for name, tensor in trainer.export_weights(torch.float32)}
        by_loaders(target, whole, SYNCS)
        assert samples(target) == found, "also of experts, which vLLM joins"
        return sent, said, sum(tensor.nbytes for tensor in whole.values())
    finally:
        target.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("kind", "sizes", "scenario"),
    [
        (
            "qwen3",
            {"vocab_size": 70, "num_key_value_heads": 1},
            FSDP,
        ),  # with rows of padding, a head for both
        pytest.param("qwen3", {}, TP, marks=megatron),
        pytest.param("qwen3_moe", {}, EXPERTS, marks=megatron),
    ],
)
def test_each_worker_of_vllm_gets_what_it_keeps(kind, sizes, scenario, tmp_path):
    needed("vllm")
    from updated_engines import write_model

    write_model(tmp_path, kind, tie_word_embeddings=False, **sizes)
    out = run_workers(to_a_divided_engine, 2, scenario, tmp_path, deadline_s=300)
    for sent, said, whole in out:
        assert sent[0] == 0 and sent[1] == sent[2] < 0.3 * whole, said
        assert any("goes by shards" in line for line in said)
    if scenario is FSDP:
        assert all(sent[1] > 0 for sent, _, _ in out)
