"""Weights of real trainers, sent by shards: what the ranks of an engine keep is bit for bit the export's."""

import importlib.util

import pytest
import torch
import torch.distributed as dist
import train_engine_cases as cases
from dist_harness import run_workers
from fixtures_tiny import make_tiny_model_dir
from train_engine_cases import Scenario

from siirl.engines.train.pieces import Piece
from siirl.engines.weights import shard_sync
from siirl.engines.weights.shard_sync import ShardSync, boxes_of
from siirl.errors import WeightSyncError

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)
TP2 = (("tp", 2),)
CASES = [
    ("qwen3", Scenario("fsdp", 2)),
    pytest.param("qwen3_moe", Scenario("copies of shards", 4, fsdp_size=2), marks=pytest.mark.slow),
    pytest.param(
        "qwen3_moe", Scenario("experts on their ranks", 2, sizes=(("ep", 2),)), marks=pytest.mark.slow
    ),
    pytest.param("qwen3", Scenario("megatron", 2, strategy="megatron", sizes=TP2), marks=needs_megatron),
    pytest.param(
        "qwen3_moe",
        Scenario("megatron", 4, strategy="megatron", sizes=(("pp", 2), ("ep", 2))),
        marks=needs_megatron,
    ),
    *(
        pytest.param(
            kind,
            Scenario("megatron", 4, strategy="megatron", sizes=(("ep", 2), ("etp", 2))),
            marks=[needs_megatron, pytest.mark.slow],
        )
        for kind in ("granitemoe", "gpt_oss")  # whose files have all experts of a layer in one tensor
    ),
]


def sliced(name, tensor, part, parts):
    """What one rank of a tensor parallel engine keeps: rows or columns; norms and routers whole."""
    axis = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
    if tensor.dim() < 2 or name.endswith("mlp.gate.weight") or tensor.shape[axis] % parts:
        return Piece(tensor, (0,) * tensor.dim())
    size = tensor.shape[axis] // parts
    offset = tuple(part * size if place == axis else 0 for place in range(tensor.dim()))
    return Piece(tensor.narrow(axis, part * size, size), offset)


def brought(rank, world, scenario, folder):
    """Of a sync before a step and one after it; engines of two ranks each, on all ranks but the first."""
    shard_sync.ROUND_BYTES, shard_sync.PART_BYTES = 6000, 1000
    engine, _ = cases.build_engine(scenario, folder)
    whole = dict(engine.export_weights(torch.bfloat16))
    engine_ranks = range(1, world) if world > 2 else range(world)
    kept = {}
    if rank in engine_ranks:
        slices = {name: sliced(name, x, rank % 2, 2) for name, x in whole.items()}
        kept = {name: [Piece(torch.zeros_like(x), at)] for name, (x, at) in slices.items()}
    boxes = {name: ("torch.bfloat16", each) for name, each in boxes_of(kept).items()}
    sync = ShardSync(engine.held_pieces(), boxes, dist.group.WORLD, "cpu")
    sent, before = [], None
    batch = dist.batch_isend_irecv

    def counted(works):
        sent.extend(work.tensor.nbytes for work in works if work.op is dist.isend)
        return batch(works)

    for step in range(2):
        dist.batch_isend_irecv = counted
        sync.run(engine.held_pieces(), kept)
        dist.batch_isend_irecv = batch
        whole = dict(engine.export_weights(torch.bfloat16))
        for name, ((local, _),) in kept.items():
            assert torch.equal(local, sliced(name, whole[name], rank % 2, 2).local), name
        assert before is None or any(not torch.equal(before[name], x) for name, x in whole.items())
        before = {name: x.clone() for name, x in whole.items()}
        cases.train_steps(engine, scenario, range(step, step + 1))
    return sum(sent) // 2, sum(x.nbytes for x in whole.values()), len(sent)


@pytest.mark.parametrize(("family", "scenario"), CASES)
def test_what_ranks_keep_is_the_export_before_and_after_a_step(family, scenario, tmp_path):
    make_tiny_model_dir(tmp_path, family, vocab=64, tokenizer=False, tie=False, init_std=0.2)
    out = run_workers(brought, scenario.world, scenario, str(tmp_path), deadline_s=90)
    sent, whole = [one[0] for one in out], out[0][1]
    if scenario.sizes == TP2:
        assert sent == [0, 0], "each rank has what it keeps"
        return
    engines = 1 if scenario.world == 2 else 1.5
    assert 0 < max(sent) < whole and sum(sent) < 1.4 * engines * whole
    assert any(count > 2 for *_, count in out), "several rounds"


def lacking(rank, world):
    kept = {"w": ("torch.float32", [((0, 4),)])} if rank == 1 else {}
    held = {"w": [Piece(torch.ones(3), (0,))]} if rank == 0 else {}
    with pytest.raises(WeightSyncError, match="cannot be sent by shards: w: of the 4 elements"):
        ShardSync(held, kept, dist.group.WORLD, "cpu")


def test_what_no_rank_holds_fails_on_all_ranks():
    run_workers(lacking, 2)
