"""Engines of a policy on any ranks answer the same, and a rank that fails takes all others with it."""

import asyncio
import functools
import itertools
import json
import os
import random
import signal
import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from dist_harness import WorkerFailure, run_workers
from episodes_in_flight_cases import POLICIES, TALK, Episodes, SlowWaves
from fixtures_tiny import make_tiny_model_dir
from plan_cases import add_agent, compiled

from siirl.compiler.plan import ModelPlan, Plan
from siirl.config import load_config
from siirl.dag.spec import DagBuilder
from siirl.data.completions import SamplingParams
from siirl.engines.engine_registry import make_rollout_engine
from siirl.errors import PeerError, RolloutError
from siirl.nodes.episodes_in_flight import EpisodesInFlight
from siirl.nodes.streams import Streams
from siirl.parallel.dims import ParallelDims

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [11], [5, 6, 7], [3, 3], [2, 9]]
PARAMS = SamplingParams(max_tokens=8, stop_token_ids=(4, 9))
SPOKEN = SamplingParams(max_tokens=40, stop_token_ids=(3,))
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


def streams_of(plan, rank, model_dir, goes_on, make=engine_of, deadline_s=30.0):
    """goes_on: its services are kept from step to step."""
    found = plan.interactions["rollout_0"]
    engines = {name: make(name, model_dir) for name in found.policies if rank in plan.models[name].ranks}
    peers = dist.new_group(found.connected) if goes_on and found.connected else None
    peers = peers if rank in found.connected else None
    return Streams(found, rank, engines, dist.group.WORLD, deadline_s, peers), engines


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
        with streams.step(), streams.open() as policies:
            heard.append(asyncio.run(all_turns(policies["agent_1.rollout"])))
    return heard


def play_everywhere(rank, world_size, plans, model_dir):
    heard = []
    for text, goes_on in itertools.product(plans, (False, True)):
        plan = Plan.from_json(text)
        streams, _ = streams_of(plan, rank, model_dir, goes_on)
        heard.append(take_part(plan, streams, rank))
        streams.close()
    own = engine_of("agent_1.rollout", model_dir).generate(PROMPTS, PARAMS, range(len(PROMPTS)))
    return heard, [sample.token_ids for (sample,) in own]


def test_a_policy_says_the_same_wherever_its_engines_are(tmp_path):
    path = make_tiny_model_dir(tmp_path / "model", vocab=24, init_std=0.3, tokenizer=False)
    results = run_workers(play_everywhere, 3, plans_of(PLACEMENTS), path)
    for rank, (heard, expected) in enumerate(results):
        for ((first, _), _), turns in zip(itertools.product(PLACEMENTS, range(2)), heard, strict=True):
            drives = rank < {"0": 1, "0-1": 2, "0-2": 3}[first]
            assert turns == ([expected, expected] if drives else [])


def fail_in_turn(rank, world_size, plans, model_dir):
    """A driver fails; then an engine, on a rank that only serves, and on one that drives as well."""
    apart, fewer, alone = (Plan.from_json(text) for text in plans)
    raised = []
    cases = [(False, apart, None), (False, apart, 2), (False, fewer, 0)]
    cases += [(True, alone, None), (True, apart, 2), (True, fewer, 0)]  # alone: others would see rank 0 end
    for goes_on, plan, broken in cases:
        streams, engines = streams_of(plan, rank, model_dir, goes_on)
        if rank == broken:
            engines["agent_1.rollout"].stream = no_stream
        try:
            if broken is None and rank == 0:
                with streams.step(), streams.open() as policies:
                    asyncio.run(all_turns(policies["agent_1.rollout"]))
                    raise ValueError("the user's code")
            take_part(plan, streams, rank, 1000)
        except (ValueError, RolloutError) as error:
            raised.append(f"{type(error).__name__}: {error}")
        else:
            raised.append("")
        dist.barrier()  # so that nobody stops listening before all have come
        streams.close()
        for engine in engines.values():
            engine.__dict__.pop("stream", None)
    return raised


def no_stream(interrupt, runs_in_background):
    raise RolloutError("no weights")


def test_who_fails_tells_all_others_why(tmp_path):
    path = make_tiny_model_dir(tmp_path / "model", vocab=24, init_std=0.3, tokenizer=False)
    plans = plans_of((("0-1", "2"), ("0-1", "0"), ("0", "2")))
    ranks = run_workers(fail_in_turn, 3, plans, path)
    for goes_on in (False, True):
        driver, client, server = (raised[3 * goes_on :][:3] for raised in ranks)
        assert driver[0] == "ValueError: the user's code"
        failed = f"rank 0, which rank 2 serves 'agent_1.rollout' to, failed: {driver[0]}"
        assert server[0] == f"PeerError: {failed}"
        assert goes_on or failed in client[0]
        assert server[1] == driver[2] == "RolloutError: no weights"
        for peer in (driver[1], client[1], client[2]):
            assert peer.startswith("PeerError: rank ") and peer.endswith("failed: no weights")


class Driver(Episodes):
    """One driver of several, whose engines are anywhere and go on while others train."""

    exact = sampled_here = False

    def __init__(self, shard, shards, streams, case, cut=None):
        """cut: the step of a checkpoint and what it holds, to resume from."""
        self.case, (batch, n, max_lag, share, steps, stale) = case, case
        super().__init__(shards, batch, n, max_lag, share * max_lag, steps, TALK)
        self.streams, self.loaders = streams, [self.loaders[shard]]
        self.kept = [EpisodesInFlight(max_lag, share * max_lag, batch, stale=stale, runs_in_background=True)]
        if cut is not None:
            self.step, states, position = cut
            self.kept[0].load_state(states, shard, shards)
            self.loaders[0].load_state_dict(position)

    def advance(self, most):
        """One step. most: the largest number of all drivers."""
        (loader,), (kept,) = self.loaders, self.kept
        self.step += 1
        missing = most(kept.num_missing(loader, self.step, self.steps))
        kept.admit(kept.load(loader, missing), self.step)
        with self.streams.step() as versions:
            assert versions == dict.fromkeys(POLICIES, self.step)
            ask = (self.game, self.begin, self.step, versions)
            left = kept.play(lambda: self.streams.open(kept.may_end, True), *ask)
        self.check(left)

    def validate(self):
        self.kept[0].pause()
        with self.streams.step(), self.streams.open() as policies:
            turns = self.kept[0].run(validation_turns(policies))
        assert {turn.weight_version for turn in turns} == {self.step}


async def validation_turns(policies):
    asked = [policy.generate([5], SPOKEN, 7) for found in policies.values() for policy in found]
    return await asyncio.gather(*asked)


def slow_engine(name, _):
    return SlowWaves()


def train_beside(rank, world_size, plans, cases):
    """What drivers train in runs that are killed and resumed once, how old it is, and the tokens that engines
    which play nothing have said while others trained."""
    found = []
    for number, (text, case) in enumerate(zip(plans, cases, strict=True)):
        plan, rng, own = Plan.from_json(text), random.Random(number), random.Random(f"{number} {rank}")
        drivers, steps = plan.run_of("rollout_0").ranks, case[4]
        group = dist.new_group(drivers)

        def most(value, group=group):
            values = torch.tensor([value])
            dist.all_reduce(values, dist.ReduceOp.MAX, group)
            return int(values)

        streams, engines = streams_of(plan, rank, None, True, slow_engine)
        job = Driver(drivers.index(rank), len(drivers), streams, case) if rank in drivers else None
        trained, lags, said_beside, killed_after = [], [], 0, rng.randrange(1, 1 + steps)
        for step in range(1, 1 + steps):
            dist.barrier()  # the rows of the step before are trained
            before = sum(engine.num_steps for engine in engines.values())
            time.sleep(own.random() * 0.04)
            said_beside += sum(engine.num_steps for engine in engines.values()) - before
            for engine in engines.values():
                with engine.streams_held():
                    engine.load_weights((), step)
            streams.serve() if job is None else job.advance(most)
            if rng.random() < 0.3:
                streams.serve() if job is None else job.validate()
            if step == killed_after:
                parts = [None] * world_size
                mine = job and (json.loads(job.state())[0][0], job.loaders[0].state_dict())
                dist.all_gather_object(parts, mine)
                if job is not None:
                    trained, lags = job.trained, job.lags
                    job.close()
                dist.barrier()
                streams.close()
                streams, engines = streams_of(plan, rank, None, True, slow_engine)
                if job is not None:
                    states = [part[0] for part in parts if part]
                    job = Driver(drivers.index(rank), len(drivers), streams, case, (step, states, mine[1]))
        if job is not None:
            trained, lags = trained + job.trained, lags + job.lags
            job.close()
        dist.barrier()
        streams.close()
        found.append((trained, lags, 0 if rank in drivers else said_beside))
    return found


def test_episodes_go_on_wherever_their_engines_are_and_are_trained_once_within_the_bound():
    """Whatever new weights, validations, a kill, and the ends of steps find half said."""
    rng = random.Random(5)
    placements = [rng.choice(PLACEMENTS[:4]) for _ in range(10)]
    modes = ["wait", "wait", "wait", "restart", "drop"] * 2
    cases = [
        (rng.randint(1, 6), rng.randint(1, 3), rng.randint(1, 3), rng.random(), rng.randint(2, 6), stale)
        for stale in modes
    ]
    ranks = run_workers(train_beside, 3, plans_of(placements), cases, deadline_s=120)
    assert sum(said for of_rank in ranks for *_, said in of_rank) > 0
    for case, *parts in zip(cases, *ranks, strict=True):
        batch, n, max_lag, _, steps, stale = case
        trained = [group for part, *_ in parts for group in part]
        assert len(trained) == steps * batch, case
        assert max(lag for _, lags, _ in parts for lag in lags) <= max_lag, case
        if stale != "drop":
            plain = Episodes(1, batch, n, 1, 0.0, steps).finish()
            assert Counter(trained) == Counter(plain.trained), case


def die_while_others_wait(rank, world_size, plans, model_dir):
    plan = Plan.from_json(plans[0])
    streams, _ = streams_of(plan, rank, model_dir, goes_on=False)
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
