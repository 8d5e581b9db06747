"""An engine on one rank speaks for episodes on another: the same tokens as an engine at hand."""

import asyncio

import torch
import torch.distributed as dist
from dist_harness import run_workers
from fixtures_tiny import make_tiny_model_dir

from siirl.agents.stream_client import StreamClient
from siirl.compiler.plan import ModelPlan
from siirl.config import load_config
from siirl.data.completions import SamplingParams
from siirl.engines.engine_registry import make_rollout_engine
from siirl.engines.rollout.remote import RemoteStream, StreamServer, gather_addresses
from siirl.parallel.dims import ParallelDims

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [11], [5, 6, 7]]
PARAMS = SamplingParams(max_tokens=12, stop_token_ids=(4, 9))


def loaded_engine(model_dir):
    from transformers import AutoModelForCausalLM

    cfg = load_config(
        [
            "actor_rollout_ref.rollout.name=hf",
            f"actor_rollout_ref.model.path={model_dir}",
            "actor_rollout_ref.rollout.dtype=float32",
        ]
    )
    plan = ModelPlan("agent_1.rollout", 1, "rollout", "hf", "lm", False, (1,), ParallelDims(1), "speaker", ())
    engine = make_rollout_engine(plan, cfg, None, torch.device("cpu"))
    engine.load_weights(AutoModelForCausalLM.from_pretrained(model_dir).state_dict().items(), version=3)
    return engine


def one_drives_one_serves(rank, world_size, model_dir):
    engine = loaded_engine(model_dir)
    server = StreamServer("agent_1.rollout", rank, 30.0) if rank == 1 else None
    addresses = gather_addresses(server.address if server else None, dist.group.WORLD)
    assert list(addresses) == [1]
    if server is not None:
        for _ in range(2):
            server.serve(engine.stream, [0])
        server.close()
        return None
    heard = []
    for _ in range(2):
        with StreamClient(lambda: RemoteStream(addresses[1], rank, 30.0), "agent_1.rollout", 30.0) as policy:
            heard.append(asyncio.run(all_turns(policy)))
    own = engine.generate(PROMPTS, PARAMS, range(len(PROMPTS)))
    return heard, [sample for (sample,) in own]


async def all_turns(policy):
    turns = (policy.generate(prompt, PARAMS, seed) for seed, prompt in enumerate(PROMPTS))
    return await asyncio.gather(*turns)


def test_an_engine_on_another_rank_says_what_one_at_hand_says(tmp_path):
    path = make_tiny_model_dir(tmp_path / "model", vocab=24, init_std=0.3, tokenizer=False)
    (heard, own), _ = run_workers(one_drives_one_serves, 2, path)
    for answers in heard:
        for said, expected in zip(answers, own, strict=True):
            assert said.token_ids == expected.token_ids
            assert (said.finish_reason, said.weight_version) == (expected.finish_reason, 3)
            torch.testing.assert_close(
                torch.tensor(said.log_probs), torch.tensor(expected.log_probs), atol=1e-5, rtol=0
            )
