"""Two schedulers of vLLM side by side, one of which asks for slots once a block: they decide the same."""

import functools
import random
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from fixtures_tiny import make_tiny_model_dir
from later import Later, needed
from some_cases import some

needed("vllm")
steps = Later("siirl.engines.rollout.vllm.native_steps")
configs = Later("vllm.config")
sampling_params = Later("vllm.sampling_params")
hashing = Later("vllm.utils.hashing")
cache_utils = Later("vllm.v1.core.kv_cache_utils")
caches = Later("vllm.v1.kv_cache_interface")
outputs = Later("vllm.v1.outputs")
requests = Later("vllm.v1.request")
structured = Later("vllm.v1.structured_output")

BLOCK, VOCAB, MAX_LEN = 4, 50, 64


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_tiny_model_dir(
        tmp_path_factory.mktemp("model"), vocab=VOCAB, max_positions=MAX_LEN, tokenizer=False
    )


@functools.cache
def configured(model_dir, ahead):
    """ahead: the scheduler runs one step ahead of the model."""
    model = configs.ModelConfig(
        str(model_dir), skip_tokenizer_init=True, dtype="float32", max_model_len=MAX_LEN
    )
    cache = configs.CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
    cache.num_gpu_blocks = 1  # it only asks whether there are some
    settings = configs.SchedulerConfig.default_factory(
        max_num_seqs=8,
        max_num_batched_tokens=24,
        max_model_len=MAX_LEN,
        enable_chunked_prefill=True,
        async_scheduling=ahead,
        watermark=0.0,
    )
    return configs.VllmConfig(model_config=model, cache_config=cache, scheduler_config=settings)


def make_scheduler(model_dir, blocks, ahead, window=None):
    """vLLM's own, over a KV cache of so many blocks."""
    config = configured(model_dir, ahead)
    size = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    kind = (
        caches.FullAttentionSpec(**size)
        if window is None
        else caches.SlidingWindowSpec(**size, sliding_window=window)
    )
    layout = caches.KVCacheConfig(blocks, [], [caches.KVCacheGroupSpec(["layer"], kind)])
    make = config.scheduler_config.get_scheduler_cls()
    return make(config, layout, structured.StructuredOutputManager(config), BLOCK)


class Twin:
    """A scheduler, and a model that samples tokens by the name of the request and their places alone."""

    def __init__(self, scheduler, depth, seed):
        self.scheduler, self.depth, self.rng = scheduler, depth, random.Random(seed)
        self.in_work = deque()
        self.allocate, self.asked = scheduler.kv_cache_manager.allocate_slots, 0
        scheduler.kv_cache_manager.allocate_slots = self.counted

    def counted(self, *args, **options):
        self.asked += 1
        return self.allocate(*args, **options)

    def step(self):
        """What the scheduler decides of a step, and then makes of the tokens of the one before."""
        found = []
        if self.scheduler.has_requests():
            decided = self.scheduler.schedule()
            self.in_work.append((decided, self.reading(decided)))
            found.append(decided)
        if len(self.in_work) >= self.depth or (self.in_work and not found):
            self.finish(*self.in_work.popleft())
        return found

    def finish(self, decided, reading):
        names = [*decided.num_scheduled_tokens]
        tokens = []
        for name in names:
            count = 0 if name in reading else 1
            tokens.append([self.rng.randrange(2, VOCAB) for _ in range(count)])
        places = {name: place for place, name in enumerate(names)}
        self.scheduler.update_from_output(decided, outputs.ModelRunnerOutput(names, places, tokens))

    def reading(self, decided):
        """Requests of a step of which tokens that are there are still to be read after it."""
        starts = {new.req_id: new.num_computed_tokens for new in decided.scheduled_new_reqs}
        cached = decided.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        ends = {name: starts[name] + count for name, count in decided.num_scheduled_tokens.items()}
        return {name for name, end in ends.items() if end < self.scheduler.requests[name].num_tokens}


def shown(decided):
    """All that a model runner is told of blocks, and who runs."""
    cached = decided.scheduled_cached_reqs
    return (
        decided.num_scheduled_tokens,
        [(new.req_id, new.block_ids, new.num_computed_tokens) for new in decided.scheduled_new_reqs],
        (cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, cached.resumed_req_ids),
        decided.preempted_req_ids,
        decided.finished_req_ids,
    )


def held(scheduler):
    """What lies in the blocks: who has which, and under which hashes they are found."""
    manager = scheduler.kv_cache_manager
    blocks = {
        name: manager.get_block_ids(name)
        for name, request in scheduler.requests.items()
        if request in scheduler.running
    }
    hashes = [(block.block_id, block.block_hash, block.ref_cnt) for block in manager.block_pool.blocks]
    return blocks, hashes, manager.block_pool.get_num_free_blocks()


@pytest.mark.parametrize("seed", some(range(12), *range(6)))
@pytest.mark.parametrize("ahead", [False, True])
def test_what_is_decided_and_what_is_cached_are_the_same(model_dir, seed, ahead):
    rng = random.Random(seed)
    blocks = rng.choice([20, 28, 200])
    twins = [Twin(make_scheduler(model_dir, blocks, ahead), 2 if ahead else 1, seed) for _ in range(2)]
    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=twins[1].scheduler))
    steps.ask_for_slots_once_a_block(SimpleNamespace(engine_core=core))
    cache_utils.init_none_hash(hashing.sha256)
    begins = [[rng.randrange(2, VOCAB) for _ in range(rng.randrange(1, 20))] for _ in range(3)]
    number, preempted, hits = 0, 0, 0
    while number < 40 or twins[0].scheduler.has_requests():
        if number < 40 and rng.random() < 0.3:
            prompt = rng.choice(begins) + [rng.randrange(2, VOCAB) for _ in range(rng.randrange(1, 12))]
            params = sampling_params.SamplingParams(max_tokens=rng.randrange(1, 30), ignore_eos=True)
            params.update_from_generation_config({}, None)
            for twin in twins:
                hasher = cache_utils.get_request_block_hasher(BLOCK, hashing.sha256)
                twin.scheduler.add_request(
                    requests.Request(str(number), prompt, params, None, block_hasher=hasher)
                )
            number += 1
        found = [twin.step() for twin in twins]
        assert [shown(x) for x in found[0]] == [shown(x) for x in found[1]]
        assert held(twins[0].scheduler) == held(twins[1].scheduler)
        preempted += sum(len(x.preempted_req_ids or ()) for x in found[0])
        hits += sum(new.num_computed_tokens > 0 for x in found[0] for new in x.scheduled_new_reqs)
    assert hits > 3 and (preempted > 0) == (blocks < 200)
    assert twins[1].asked < 0.85 * twins[0].asked


def test_a_scheduler_whose_blocks_are_freed_while_a_row_grows_is_left_alone(model_dir):
    scheduler = make_scheduler(model_dir, 40, False, window=8)
    manager = scheduler.kv_cache_manager
    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
    steps.ask_for_slots_once_a_block(SimpleNamespace(engine_core=core))
    steps.ask_for_slots_once_a_block(SimpleNamespace(engine_core=SimpleNamespace()))  # in another process
    assert "allocate_slots" not in vars(manager)
