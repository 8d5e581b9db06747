"""Engines of a policy on any ranks answer the same, and a rank that fails takes all others with it."""

import asyncio
import functools
import os
import signal

import pytest
import torch.distributed as dist
from dist_harness import WorkerFailure, run_workers
from fixtures_tiny import make_tiny_model_dir
from plan_cases import add_agent, compiled

from siirl.compiler.plan import ModelPlan, Plan
from siirl.config import load_config
from siirl.dag.spec import DagBuilder
from siirl.data.completions import SamplingParams
from siirl.engines.engine_registry import make_rollout_engine
from siirl.errors import PeerError, RolloutError
from siirl.nodes.streams import Streams
from siirl.parallel.dims import ParallelDims

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [11], [5, 6, 7], [3, 3], [2, 9]]
PARAMS = SamplingParams(max_tokens=8, stop_token_ids=(4, 9))
PLACEMENTS = (("0", "1-2"), ("0-1", "2"), ("0-1", "1-2"), ("0-1", "0"), ("0-2", "0-2"))


def plans_of(placements) -> list[str]:
    made = []
    for first, second in placements:
        dag = DagBuilder("pair")
        above = add_agent(dag, 0, placement=first)["rollout"]
        add_agent(dag, 1, placement=second, dependencies=[above])
        made.append(compiled(dag.build(), 3).to_json())
    return made


@functools.cache
def engine_of(name, model_dir):
    """An engine with weights, made once in a process; it stands for any policy."""
    from transformers import AutoModelForCausalLM

    cfg = load_config(
        [
            "actor_rollout_ref.rollout.name=hf",
            f"actor_rollout_ref.model.path={model_dir}",
            "actor_rollout_ref.rollout.dtype=float32",
        ]
    )
    plan = ModelPlan(name, 0, "rollout", "hf", "lm", False, (0,), ParallelDims(1), "speaker", ())
    engine = make_rollout_engine(plan, cfg, None, "cpu")
    engine.load_weights(AutoModelForCausalLM.from_pretrained(model_dir).state_dict().items(), version=3)
    return engine


def streams_of(plan, rank, model_dir, deadline_s=30.0):
    models = [name for name in plan.interactions["rollout_0"].policies if rank in plan.models[name].ranks]
    engines = {name: engine_of(name, model_dir) for name in models}
    found = plan.interactions["rollout_0"]
    return Streams(found, rank, engines, dist.group.WORLD, deadline_s), engines


async def all_turns(policies):
    """Every prompt is asked of the engine that its episode keeps to."""
    turns = [
        policies[index % len(policies)].generate(prompt, PARAMS, index)
        for index, prompt in enumerate(PROMPTS)
    ]
    return [turn.token_ids for turn in await asyncio.gather(*turns)]


def take_part(plan, streams, rank, times=2):
    """What a rank does in an interaction: drivers get the tokens of all prompts."""
    heard = []
    for _ in range(times):
        if rank not in plan.run_of("rollout_0").ranks:
            streams.serve()
            continue
        with streams.open() as policies:
            heard.append(asyncio.run(all_turns(policies["agent_1.rollout"])))
    return heard


def play_everywhere(rank, world_size, plans, model_dir):
    heard = []
    for text in plans:
        plan = Plan.from_json(text)
        streams, _ = streams_of(plan, rank, model_dir)
        heard.append(take_part(plan, streams, rank))
        streams.close()
    own = engine_of("agent_1.rollout", model_dir).generate(PROMPTS, PARAMS, range(len(PROMPTS)))
    return heard, [sample.token_ids for (sample,) in own]


def test_a_policy_says_the_same_wherever_its_engines_are(tmp_path):
    path = make_tiny_model_dir(tmp_path / "model", vocab=24, init_std=0.3, tokenizer=False)
    results = run_workers(play_everywhere, 3, plans_of(PLACEMENTS), path)
    for rank, (heard, expected) in enumerate(results):
        for (first, _), turns in zip(PLACEMENTS, heard, strict=True):
            drives = rank < {"0": 1, "0-1": 2, "0-2": 3}[first]
            assert turns == ([expected, expected] if drives else [])


def fail_in_turn(rank, world_size, plans, model_dir):
    """A driver fails; then an engine, on a rank that only serves, and on one that drives as well."""
    apart, fewer = (Plan.from_json(text) for text in plans)
    raised = []
    for plan, broken in ((apart, None), (apart, 2), (fewer, 0)):
        streams, engines = streams_of(plan, rank, model_dir)
        if rank == broken:
            engines["agent_1.rollout"].stream = no_stream
        try:
            if broken is None and rank == 0:
                with streams.open() as policies:
                    asyncio.run(all_turns(policies["agent_1.rollout"]))
                    raise ValueError("the user's code")
            take_part(plan, streams, rank, 1000)
        except (ValueError, RolloutError) as error:
            raised.append(f"{type(error).__name__}: {error}")
        dist.barrier()  # so that nobody stops listening before all have come
        streams.close()
    return raised


def no_stream(interrupt):
    raise RolloutError("no weights")


def test_who_fails_tells_all_others_why(tmp_path):
    path = make_tiny_model_dir(tmp_path / "model", vocab=24, init_std=0.3, tokenizer=False)
    driver, client, server = run_workers(fail_in_turn, 3, plans_of((("0-1", "2"), ("0-1", "0"))), path)
    assert driver[0] == "ValueError: the user's code"
    assert server[0] == "PeerError: rank 0, which rank 2 serves 'agent_1.rollout' to, failed: " + driver[0]
    assert server[0].removeprefix("PeerError: ") in client[0]
    assert server[1] == driver[2] == "RolloutError: no weights"
    for peer in (driver[1], client[1], client[2]):
        assert peer.startswith("PeerError: rank ") and peer.endswith("failed: no weights")


def die_while_others_wait(rank, world_size, plans, model_dir):
    plan = Plan.from_json(plans[0])
    streams, _ = streams_of(plan, rank, model_dir)
    take_part(plan, streams, rank, 1)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerError, match=r"rank 2 .* it died or failed"):
        take_part(plan, streams, rank, 1)


@pytest.mark.slow
def test_a_rank_that_dies_is_named_by_those_who_asked_it(tmp_path):
    path = make_tiny_model_dir(tmp_path / "model", vocab=24, init_std=0.3, tokenizer=False)
    with pytest.raises(WorkerFailure, match="exit code -9") as caught:
        run_workers(die_while_others_wait, 3, plans_of((("0-1", "2"),)), path)
    assert "rank 0" not in str(caught.value)
