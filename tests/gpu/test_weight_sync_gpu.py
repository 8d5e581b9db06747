"""Weights written in place on a GPU: CUDA graphs, an engine that sleeps, a copy kept in the background.

    python -m pytest tests/gpu/test_weight_sync_gpu.py -s

Prints why, if vLLM's loaders have to take a model's weights one by one.
"""

import logging
import os
import signal

import pytest
import torch
from dist_harness import run_workers
from gpu_share import IN_WORDS
from updated_engines import IN_PLACE, build, by_loaders, note_calls, samples, versions, write_model
from worker_shares import check_parameters

from siirl.engines.weights import in_place
from siirl.engines.weights.bucket import LiveWeights
from siirl.parallel.process_groups import ProcessGroupManager

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(400),
]
ROLLOUT = "actor_rollout_ref.rollout"
CASES = {
    "qwen3": {"tie_word_embeddings": True, "vocab_size": 70},
    "qwen3_moe": {"tie_word_embeddings": False, "hidden_size": 256, "moe_intermediate_size": 128},
}
MUST_BE_IN_PLACE = ("qwen3",)
BESIDE = {"read_tensor", "sleep", "wake"}
"""Calls that move no weights."""


def engine_on_gpu(folder, *overrides, device="cuda:0", groups=None):
    return build(
        folder,
        f"{ROLLOUT}.dtype=bfloat16",
        f"{ROLLOUT}.enforce_eager=False",
        f"{ROLLOUT}.max_num_seqs=16",
        *IN_WORDS,
        *overrides,
        device=device,
        groups=groups,
    )


@pytest.mark.parametrize(("kind", "room"), [("qwen3", None), ("qwen3", 0.25), ("qwen3_moe", None)])
def test_updates_in_place_are_those_of_the_loaders_also_after_a_restart(
    kind, room, tmp_path, monkeypatch, caplog
):
    """room: for all weights at once, or for pieces of them."""
    caplog.set_level(logging.WARNING)
    write_model(tmp_path, kind, head_dim=64, **{"hidden_size": 128} | CASES[kind])
    sets = versions(tmp_path, 4, "cuda:0")
    methods = note_calls(monkeypatch)
    engine = engine_on_gpu(tmp_path, f"{ROLLOUT}.weight_buffer_gib={room or 'null'}")
    try:
        expected = []
        for version, weights in enumerate(sets):
            engine.sleep()
            by_loaders(engine, weights, version)
            expected.append(samples(engine))
        assert len({str(one) for one in expected}) == len(sets)
        engine.sleep()
        engine.load_weights(sets[0].items(), 10)
        assert samples(engine) == expected[0]
        methods.clear()
        monkeypatch.setattr(in_place, "BUCKET_BYTES", 50_000)  # large tensors are cut
        live = LiveWeights({name: tensor.clone() for name, tensor in sets[0].items()})
        for version in (1, 2, 3, 1, 2):
            monkeypatch.setattr(engine._weights._writer, "_whole", version == 2)
            engine.sleep()
            live.settle()  # as a trainer does before it changes them
            for name, tensor in live:
                tensor.copy_(sets[version][name])
            engine.load_weights(live if version != 3 else sets[3].items(), 20 + version)
            assert samples(engine) == expected[version], (version, methods, caplog.text)
        print(f"\n{kind}: {sorted(set(methods))}\n{caplog.text}")
        if kind in MUST_BE_IN_PLACE:
            once = {"write"} if room else set()  # a buffer with room for all is filled and read once
            assert set(methods) - BESIDE == set(IN_PLACE) - once, caplog.text
        live.settle()
        for tensor in dict(live).values():
            tensor.zero_()  # what is kept has been copied by now
        os.kill(engine._process.pid, signal.SIGKILL)
        assert samples(engine) == expected[2] and engine.drain_restarts() == 1
        engine.sleep()
        engine.load_weights(sets[1].items(), 30)
        assert samples(engine) == expected[1]
        engine.load_weights(sets[3].items(), 31)  # as from another rank: kept piece by piece, or only now
        os.kill(engine._process.pid, signal.SIGKILL)
        assert samples(engine) == expected[3] and engine.drain_restarts() == 1
    finally:
        engine.close()


def updates_of_two(rank, world_size, folder):
    """Updates by loaders, then in place, of an engine on two GPUs; the calls in place, and why not."""
    device, patch = f"cuda:{rank}", pytest.MonkeyPatch()
    torch.cuda.set_device(device)
    sets, methods = versions(folder, 3, device), note_calls(patch)
    groups = ProcessGroupManager([(0, 1)], "cpu:gloo,cuda:nccl", 300)
    engine = engine_on_gpu(folder, device=device, groups=groups)
    try:
        expected = []
        for version, weights in enumerate(sets):
            engine.sleep()
            by_loaders(engine, weights, version)
            expected.append(samples(engine))
        assert len({str(one) for one in expected}) == len(sets)
        engine.load_weights(sets[0].items(), 10)
        methods.clear()
        patch.setattr(in_place, "BUCKET_BYTES", 50_000)  # large tensors are cut
        for number, version in enumerate((1, 2, 1), 20):
            patch.setattr(engine._weights._writer, "_whole", version == 2)
            engine.sleep()
            engine.load_weights(sets[version].items(), number)
            assert samples(engine) == expected[version]
            if rank == 0:
                check_parameters(engine, sets[version], folder, torch.bfloat16)
        return set(methods) - BESIDE, engine._weights._told_why
    finally:
        engine.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("tied", [True, False])
def test_the_workers_of_an_engine_on_two_gpus_write_their_shares(tied, tmp_path):
    write_model(tmp_path, "qwen3", head_dim=64, hidden_size=128, vocab_size=70, tie_word_embeddings=tied)
    backend = "cpu:gloo,cuda:nccl"
    (methods, why_not), _ = run_workers(updates_of_two, 2, tmp_path, deadline_s=350, backend=backend)
    assert why_not == "" and methods == set(IN_PLACE)
