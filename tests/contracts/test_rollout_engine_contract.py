"""What every rollout engine must do, whatever its backend: every row of the table with weights joins.

One engine of each kind serves the whole module, as some take long to start; what needs an engine of its own
configuration is tested on those of START_FAST.
"""

import copy
import functools
import itertools
import math
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from fixtures_tiny import make_tiny_model_dir
from sampling_reference import drawn_tokens, next_token_log_probs, truncated
from sglang_on_cpu import sglang_here
from transformers import AutoModelForCausalLM

from siirl.compiler.backends import ROLLOUT_BACKENDS
from siirl.compiler.plan import ModelPlan
from siirl.config import load_config
from siirl.data.completions import Request, SamplingParams
from siirl.dialect.dialect import derive
from siirl.dialect.template import ChatTemplate
from siirl.engines.engine_registry import make_rollout_engine
from siirl.engines.rollout.sampling import derive_seed
from siirl.errors import ConfigError, EpisodeFailed, RolloutError, WeightSyncError
from siirl.parallel.dims import ParallelDims

ENGINES = [name for name, row in ROLLOUT_BACKENDS.items() if row.weights]
START_FAST = ["hf"]
VOCAB = 24
BLOCK = 32
"""Tokens of a block of the KV cache of engines that have one."""
VERSIONS = itertools.count(100)
"""Versions of weights that an engine has not had."""
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [11], [5, 6, 7], [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    return make_tiny_model_dir(
        path, vocab=VOCAB, init_std=0.3, head_dim=32, max_positions=64, tokenizer=False
    )


@pytest.fixture(scope="module")
def reference(model_dir):
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


def build(name, model_dir, *overrides):
    cfg = load_config(
        [
            f"actor_rollout_ref.rollout.name={name}",
            f"actor_rollout_ref.model.path={model_dir}",
            "actor_rollout_ref.rollout.dtype=float32",
            "actor_rollout_ref.rollout.max_model_len=64",
            f"trainer.output_dir={model_dir}/outputs",
            *overrides,
        ]
    )
    plan = ModelPlan(
        "agent_0.rollout", 0, "rollout", name, "lm", False, (0,), ParallelDims(1), "rollout_actor", ()
    )
    return make_rollout_engine(plan, cfg, None, torch.device("cpu"))


@pytest.fixture(scope="module", params=ENGINES)
def engine_name(request):
    return request.param


@pytest.fixture(scope="module")
def shared_engine(engine_name, model_dir):
    lag = (
        "actor_rollout_ref.rollout.max_lag=1",
        f"+actor_rollout_ref.rollout.engine_kwargs.vllm.block_size={BLOCK}",
    )
    with sglang_here():
        engine = build(engine_name, model_dir, *lag)
        with pytest.raises(RolloutError, match="no usable weights"):
            engine.generate([[5]], SamplingParams(max_tokens=1), [0])
        assert engine.weight_version == -1
        yield engine
        engine.close()


@pytest.fixture
def engine(shared_engine, reference):
    """The engine with the reference's weights, whatever the test before did."""
    if shared_engine.weight_version != 7:
        shared_engine.load_weights(weights_of(shared_engine, reference), version=7)
    return shared_engine


def weights_of(engine, model):
    """What a link would deliver: the names that the engine asks for."""
    state = model.state_dict()
    return [(name, state[name]) for name in engine.weight_specs()]


def tokens(completions):
    return [[sample.token_ids for sample in prompt] for prompt in completions]


def flat(completions):
    return [sample for prompt in completions for sample in prompt]


def response_log_probs(model, prompt, response, temperature=1.0):
    """Log-probs of the response tokens by one plain forward of the whole row."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].float()
    log_probs = (logits / temperature).log_softmax(-1)
    return log_probs.gather(-1, torch.tensor(response)[:, None])[:, 0]


def test_results_come_per_prompt_in_order_with_n_samples_each(engine):
    completions = engine.generate(PROMPTS, SamplingParams(max_tokens=4, n=3), range(5))
    assert [len(prompt) for prompt in completions] == [3] * 5
    for sample in flat(completions):
        assert len(sample.token_ids) == len(sample.log_probs) == 4
        assert sample.weight_version == 7
        assert all(type(token) is int and 0 <= token < VOCAB for token in sample.token_ids)


def test_zero_prompts_give_an_empty_list(engine):
    assert engine.generate([], SamplingParams(max_tokens=4), []) == []


def test_same_seed_same_tokens_other_seed_other_tokens(engine):
    params = SamplingParams(max_tokens=12, n=2)
    first = tokens(engine.generate(PROMPTS, params, range(5)))
    assert tokens(engine.generate(PROMPTS, params, range(5))) == first
    assert tokens(engine.generate(PROMPTS, params, range(5, 10))) != first
    assert first[0][0] != first[0][1], "samples of a prompt differ"
    assert first[0] != first[3], "equal prompts with different seeds differ"


def test_a_prompt_does_not_depend_on_its_batch_or_order(engine):
    params = SamplingParams(max_tokens=10, n=3, stop_token_ids=(4, 9))
    together = engine.generate(PROMPTS, params, range(5))
    order = [3, 0, 4, 2, 1]
    shuffled = engine.generate([PROMPTS[i] for i in order], params, order)
    alone = [engine.generate([prompt], params, [i])[0] for i, prompt in enumerate(PROMPTS)]
    assert tokens(shuffled) == [tokens(together)[i] for i in order]
    assert tokens(alone) == tokens(together)
    for one, other in zip(flat(alone), flat(together), strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)


def test_prompts_may_hold_more_tokens_than_one_step_reads(engine):
    """The last prompt that fits the default max_num_batched_tokens (8,192) would be cut in two."""
    prompts = [[(7 * row + position) % 20 + 2 for position in range(49)] for row in range(170)]
    params = SamplingParams(max_tokens=2)
    together = tokens(engine.generate(prompts, params, range(170)))
    assert together[160:] == tokens(engine.generate(prompts[160:], params, range(160, 170)))


@pytest.mark.parametrize("name", START_FAST)
def test_the_result_does_not_depend_on_how_many_run_at_once(name, model_dir, reference):
    params = SamplingParams(max_tokens=10, n=3, stop_token_ids=(4, 9))
    results = []
    for at_once in (100, 2):
        engine = build(name, model_dir, f"actor_rollout_ref.rollout.max_num_seqs={at_once}")
        engine.load_weights(weights_of(engine, reference), version=7)
        results.append(tokens(engine.generate(PROMPTS, params, range(5))))
        engine.close()
    assert results[0] == results[1]


def test_fewer_samples_are_the_first_of_more(engine):
    many = tokens(engine.generate(PROMPTS, SamplingParams(max_tokens=6, n=4), range(5)))
    few = tokens(engine.generate(PROMPTS, SamplingParams(max_tokens=6, n=2), range(5)))
    assert few == [prompt[:2] for prompt in many]


def test_a_large_seed_is_accepted(engine):
    assert engine.generate([[5]], SamplingParams(max_tokens=2), [(1 << 63) - 1])[0][0].token_ids


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.8])
def test_log_probs_equal_a_separate_forward(engine, reference, temperature):
    params = SamplingParams(max_tokens=8, n=2, temperature=temperature, top_k=10, top_p=0.9)
    for prompt, samples in zip(PROMPTS, engine.generate(PROMPTS, params, range(5)), strict=True):
        for sample in samples:
            expected = response_log_probs(reference, prompt, sample.token_ids, temperature)
            torch.testing.assert_close(torch.tensor(sample.log_probs), expected, atol=1e-5, rtol=0)


def test_greedy_equals_transformers_generate(engine, reference):
    stop = 9
    completions = engine.generate(
        PROMPTS, SamplingParams(max_tokens=9, temperature=0, stop_token_ids=(stop,)), [0] * 5
    )
    for prompt, (sample,) in zip(PROMPTS, completions, strict=True):
        expected = reference.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=9, eos_token_id=stop, pad_token_id=0
        )
        assert sample.token_ids == expected[0, len(prompt) :].tolist()
        log_probs = response_log_probs(reference, prompt, sample.token_ids)
        torch.testing.assert_close(torch.tensor(sample.log_probs), log_probs, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, -1, 1.0),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((0.6, -1, 1.0), (1.0, 5, 1.0), (1.0, -1, 0.8))
        ),
        (1.5, 9, 0.7),
    ],
)
def test_samples_follow_the_exact_distribution(engine, reference, temperature, top_k, top_p):
    prompt, n = [9, 8, 7, 6], 1000
    params = SamplingParams(max_tokens=1, n=n, temperature=temperature, top_k=top_k, top_p=top_p)
    exact = truncated(next_token_log_probs(reference, prompt, temperature), top_k, top_p)
    counts = Counter(sample.token_ids[0] for sample in engine.generate([prompt], params, [123])[0])
    assert set(counts) <= set(exact), "a token that top-k or top-p excludes was sampled"
    chi_square = sum((counts[token] - n * prob) ** 2 / (n * prob) for token, prob in exact.items())
    freedom = len(exact) - 1
    limit = freedom + 4.5 * math.sqrt(2 * freedom)
    assert freedom > 1 and chi_square < limit, (
        f"chi-square {chi_square:.1f} with {freedom} degrees of freedom"
    )


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, -1), (0.7, 6)])
def test_a_seed_draws_the_same_tokens_in_every_engine(engine, reference, temperature, top_k):
    """The number of each position is that of `uniforms`: on the CPU, engines differ by rounding alone."""
    params = SamplingParams(max_tokens=5, n=2, temperature=temperature, top_k=top_k)
    for row, samples in enumerate(engine.generate(PROMPTS, params, range(5))):
        for number, sample in enumerate(samples):
            seed = derive_seed(row, number)
            assert sample.token_ids == drawn_tokens(reference, PROMPTS[row], seed, 5, temperature, top_k)


def test_positions_of_a_response_are_independent(engine):
    """Uniform weights would hide a seed that is reused: the same token at every position, or in every row."""
    samples = engine.generate([[5]], SamplingParams(max_tokens=6, n=200), [3])[0]
    repeats = sum(a == b for s in samples for a, b in zip(s.token_ids, s.token_ids[1:], strict=False))
    assert repeats < 600
    assert len({tuple(sample.token_ids) for sample in samples}) > 150


def test_stop_tokens_end_a_response_and_stay_in_it(engine):
    stops = (3, 4, 5, 6)
    params = SamplingParams(max_tokens=20, n=8, stop_token_ids=stops)
    samples = flat(engine.generate(PROMPTS, params, range(5)))
    reasons = Counter(sample.finish_reason for sample in samples)
    assert reasons["stop"] > 5
    for sample in samples:
        stopped = [token in stops for token in sample.token_ids]
        assert not any(stopped[:-1])
        assert sample.finish_reason == ("stop" if stopped[-1] else "length")
        assert stopped[-1] or len(sample.token_ids) == 20


def test_stopping_early_does_not_change_what_was_said_before(engine):
    free = engine.generate(PROMPTS, SamplingParams(max_tokens=12, n=4), range(5))
    stopped = engine.generate(PROMPTS, SamplingParams(max_tokens=12, n=4, stop_token_ids=(3, 4, 5)), range(5))
    for long, short in zip(flat(free), flat(stopped), strict=True):
        assert long.token_ids[: len(short.token_ids)] == short.token_ids


class Turns:
    """A vocabulary whose chat template ends a turn by token 7; its tokenizer's end of sequence is 3."""

    eos_token_id, chat_template, name_or_path = 3, "turns", "turns"

    def get_added_vocab(self):
        return {"<end>": 7, "<user>": 8}

    def apply_chat_template(self, conversation, **options):
        return "".join(f"<user>{message['content']}<end>" for message in conversation) + "assistant:"

    def decode(self, ids, **options):
        return " ".join(map(str, ids))


STOP_SOURCES = {
    "the tokenizer's alone": (("tokenizer",), {3}),
    "a list of the config, and not its model's own": (("config",), {4, 9}),
    "one of the generation config": (("generation_config",), {5}),
    "the template's end of a turn": (("template",), {7}),
    "all of them": (("tokenizer", "config", "generation_config", "template"), {3, 4, 5, 7, 9}),
    "none": ((), set()),
}


@functools.cache
def never_stopped(engine):
    return flat(engine.generate(PROMPTS, SamplingParams(max_tokens=20, n=4), range(5)))


@pytest.mark.parametrize("case", STOP_SOURCES)
def test_an_engine_ends_responses_at_the_stops_of_the_dialect_and_at_no_others(engine, case):
    """Not at what the files of the model say besides: token 1 of its config.json. So all engines agree."""
    sources, wanted = STOP_SOURCES[case]
    files = {"config.json": {"eos_token_id": [4, 9]}, "generation_config.json": {"eos_token_id": 5}}
    dialect = derive(Turns(), ChatTemplate(Turns(), {}), files, sources)
    assert set(dialect.stop_ids) == wanted
    free = never_stopped(engine)
    params = SamplingParams(max_tokens=20, n=4, stop_token_ids=dialect.stop_ids)
    found = flat(engine.generate(PROMPTS, params, range(5)))
    assert all(len(sample.token_ids) == 20 for sample in free) and any(1 in one.token_ids for one in free)
    for whole, sample in zip(free, found, strict=True):
        stop = next((at for at, token in enumerate(whole.token_ids) if token in wanted), None)
        assert sample.token_ids == whole.token_ids[: None if stop is None else stop + 1]
        assert sample.finish_reason == ("length" if stop is None else "stop")


def test_ignore_eos_runs_to_the_length_limit(engine):
    params = SamplingParams(max_tokens=10, n=3, stop_token_ids=tuple(range(VOCAB)), ignore_eos=True)
    samples = flat(engine.generate(PROMPTS, params, range(5)))
    assert {(len(sample.token_ids), sample.finish_reason) for sample in samples} == {(10, "length")}


def test_a_stop_token_as_the_last_allowed_token_counts_as_stop(engine):
    params = SamplingParams(max_tokens=1, stop_token_ids=tuple(range(VOCAB)))
    assert engine.generate([[5]], params, [0])[0][0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("prompts", "max_tokens", "words"),
    [
        ([[5], [6] * 60], 10, ["prompt 1", "60", "10", "64"]),
        ([[5], []], 10, ["prompt 1", "empty"]),
        ([[5, VOCAB]], 10, ["prompt 0", str(VOCAB)]),
    ],
)
def test_a_prompt_that_cannot_run_is_named(engine, prompts, max_tokens, words):
    with pytest.raises(RolloutError) as caught:
        engine.generate(prompts, SamplingParams(max_tokens=max_tokens), list(range(len(prompts))))
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("name", START_FAST)
def test_max_model_len_lowers_the_context(name, model_dir, reference):
    engine = build(name, model_dir, "actor_rollout_ref.rollout.max_model_len=8")
    engine.load_weights(weights_of(engine, reference), version=0)
    assert engine.generate([[5, 6, 7]], SamplingParams(max_tokens=5), [0])
    with pytest.raises(RolloutError, match="8 positions"):
        engine.generate([[5, 6, 7]], SamplingParams(max_tokens=6), [0])
    engine.close()


@pytest.mark.parametrize(
    "values", [{"max_tokens": 0}, {"n": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -2}]
)
def test_sampling_parameters_out_of_range_are_refused(values):
    (name,) = values
    with pytest.raises(ConfigError, match=name):
        SamplingParams(**({"max_tokens": 4} | values))


def test_new_weights_change_samples_and_version(engine, reference):
    params = SamplingParams(max_tokens=12)
    before = engine.generate(PROMPTS, params, range(5))
    engine.load_weights([(name, tensor * 0.5) for name, tensor in weights_of(engine, reference)], version=1)
    after = engine.generate(PROMPTS, params, range(5))
    assert tokens(before) != tokens(after)
    assert {sample.weight_version for prompt in after for sample in prompt} == {1}
    engine.load_weights(weights_of(engine, reference), version=2)
    assert tokens(engine.generate(PROMPTS, params, range(5))) == tokens(before)


def unknown(weights):
    return [*weights, ("model.nothing.weight", torch.zeros(3))]


def missing(weights):
    return weights[:-1]


def repeated(weights):
    return [*weights, weights[0]]


def other_shape(weights):
    name, tensor = weights[2]
    return [*weights[:2], (name, tensor[..., :-1]), *weights[3:]]


def other_kind(weights):
    name, tensor = weights[2]
    return [*weights[:2], (name, tensor.long()), *weights[3:]]


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (other_kind, ["int64", "float32"]),
        (unknown, ["model.nothing.weight", "unknown"]),
        (missing, ["1 of", "model.norm.weight"]),
        (repeated, ["model.embed_tokens.weight", "twice"]),
        (other_shape, ["shape", "needs"]),
    ],
)
def test_a_broken_sync_is_an_error_and_leaves_no_stale_weights(engine, reference, broken, words):
    with pytest.raises(WeightSyncError) as caught:
        engine.load_weights(broken(weights_of(engine, reference)), version=1)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert engine.weight_version == -1
    with pytest.raises(RolloutError, match="did not complete"):
        engine.generate([[5]], SamplingParams(max_tokens=1), [0])
    engine.load_weights(weights_of(engine, reference), version=1)
    assert engine.generate([[5]], SamplingParams(max_tokens=1), [0])[0][0].weight_version == 1


def test_weight_specs_name_tied_tensors_once_and_accept_their_other_name(engine, reference):
    specs = engine.weight_specs()
    assert ("model.embed_tokens.weight" in specs) != ("lm_head.weight" in specs)
    engine.load_weights(reference.state_dict().items(), version=7)
    shapes = {name: tuple(tensor.shape) for name, tensor in reference.named_parameters()}
    assert {name: shape for name, (shape, _) in specs.items()} == shapes


def test_weights_that_give_no_finite_log_prob_are_reported(engine, reference):
    broken = [(name, torch.full_like(tensor, torch.nan)) for name, tensor in weights_of(engine, reference)]
    engine.load_weights(broken, version=3)
    with pytest.raises(RolloutError, match="not finite"):
        engine.generate([[5]], SamplingParams(max_tokens=3), [0])


def test_sleep_and_wake_change_nothing(engine):
    params = SamplingParams(max_tokens=6)
    before = tokens(engine.generate(PROMPTS, params, range(5)))
    engine.sleep()
    engine.sleep()
    engine.wake()
    assert tokens(engine.generate(PROMPTS, params, range(5))) == before
    assert engine.weight_version == 7


def test_seeds_of_samples_are_fixed_for_all_engines():
    """Halves of the published SplitMix64 stream of seed 1234567."""
    stream = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [derive_seed(1234567, sample) for sample in range(4)] == [value >> 1 for value in stream]


VARIED = [
    SamplingParams(max_tokens=10, stop_token_ids=(4, 9)),
    SamplingParams(max_tokens=40),
    SamplingParams(max_tokens=6, temperature=0),
    SamplingParams(max_tokens=25, temperature=1.5, top_k=8, top_p=0.9),
    SamplingParams(max_tokens=25, stop_token_ids=tuple(range(VOCAB)), ignore_eos=True),
]


def requests_of(prompts=PROMPTS, first_key=0):
    return [
        Request(first_key + index, prompt, VARIED[index % len(VARIED)], seed=index)
        for index, prompt in enumerate(prompts)
    ]


def generated(engine, requests):
    """What `generate` says to each request."""
    found = {}
    for params in dict.fromkeys(request.params for request in requests):
        same = [request for request in requests if request.params == params]
        answers = engine.generate([r.prompt for r in same], params, [r.seed for r in same])
        found |= {request.key: one for request, (one,) in zip(same, answers, strict=True)}
    return found


def collected(stream, num_waits=600):
    """All answers, in the order of arrival."""
    answers = []
    for _ in range(num_waits):
        answers += stream.collect(0.2)
        if not stream.num_pending:
            return answers
    raise AssertionError(f"{stream.num_pending} requests are still pending")


def assert_same(answers, expected):
    assert sorted(key for key, _ in answers) == sorted(expected)
    for key, completion in answers:
        other = expected[key]
        assert completion.token_ids == other.token_ids
        assert completion.log_probs == pytest.approx(other.log_probs, abs=1e-5)
        assert (completion.finish_reason, completion.weight_version) == (other.finish_reason, 7)


def test_a_stream_gives_what_generate_gives(engine):
    expected = generated(engine, requests_of())
    stream = engine.stream()
    stream.submit(requests_of())
    assert stream.num_pending == 5
    assert_same(collected(stream), expected)
    assert stream.num_pending == 0


def test_requests_join_while_others_run(engine):
    requests = requests_of(PROMPTS * 2)
    expected = generated(engine, requests)
    stream = engine.stream()
    stream.submit(requests[:2])
    waiting, answers = requests[2:], []
    while waiting or stream.num_pending:
        answers += stream.collect(0.001)
        stream.submit(waiting[:1])
        waiting = waiting[1:]
    assert_same(answers, expected)


@pytest.mark.parametrize("engine_name", ["vllm", "sglang"], indirect=True)
def test_answers_come_in_order_of_completion_not_of_submission(engine):
    stream = engine.stream()
    long, short = SamplingParams(max_tokens=50), SamplingParams(max_tokens=2)
    stream.submit([Request("long", [5, 6], long, 0), Request("short", [5, 6], short, 0)])
    assert [key for key, _ in collected(stream)] == ["short", "long"]
    stream.submit([Request("long", [5, 6], long, 0)])
    assert stream.collect(0.0) == []
    stream.submit([Request("late", [7], short, 0)])
    assert [key for key, _ in collected(stream)] == ["late", "long"]


def resumed(request: Request, so_far: list[int]) -> Request:
    """The rest of a response, of which there are some tokens."""
    return replace(
        request,
        prompt=[*request.prompt, *so_far],
        params=replace(request.params, max_tokens=request.params.max_tokens - len(so_far)),
        start=len(so_far),
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_a_response_that_is_cut_and_continued_is_the_uncut_one(engine, temperature):
    params = SamplingParams(max_tokens=40, temperature=temperature, top_p=0.9, stop_token_ids=(0, 1, 2, 3))
    requests = [Request(f"{p} {s}", PROMPTS[p], params, p, sample=s) for p in range(3) for s in range(2)]
    whole = engine.generate(PROMPTS[:3], replace(params, n=2), [0, 1, 2])
    expected = {request.key: whole[request.seed][request.sample] for request in requests}
    rng = random.Random(temperature)
    for wait_s in (0.02, 0.01, 0.005, 0.002, 0.001):  # until it is shorter than a response takes here
        tokens, log_probs, ended, cuts = answered_in_parts(engine, requests, rng, wait_s)
        for key, completion in expected.items():
            assert tokens[key] == completion.token_ids, key
            assert log_probs[key] == pytest.approx(completion.log_probs, abs=1e-4)
            assert ended[key] == completion.finish_reason
        if cuts - {0}:
            break
    else:
        pytest.fail("nothing was cut")
    assert engine.generate([[5]], params, [0])  # it can be used otherwise


def answered_in_parts(engine, requests: list[Request], rng: random.Random, wait_s: float):
    """Tokens, log-probs and ends by key of responses cut now and again; the lengths where they were cut."""
    tokens, log_probs, ended, cuts = {}, {}, {}, set()
    stream = engine.stream(lambda keys: True)
    while len(ended) < len(requests):
        rest = [r for r in requests if r.key not in ended]
        stream.submit([resumed(r, tokens.get(r.key, [])) for r in rest])
        answers = [a for _ in range(rng.randint(1, 3)) for a in stream.collect(rng.uniform(0, wait_s))]
        answers += stream.pause()
        wait_s *= 1.1  # longer than a token takes at last
        assert stream.num_pending == 0 and stream.collect(0.0) == []
        for key, part in answers:
            tokens[key] = tokens.get(key, []) + part.token_ids
            log_probs[key] = log_probs.get(key, []) + part.log_probs
            if part.finish_reason == "paused":
                cuts.add(len(tokens[key]))
            else:
                ended[key] = part.finish_reason
    return tokens, log_probs, ended, cuts


@pytest.fixture
def other(reference):
    """A model with other weights."""
    model = copy.deepcopy(reference)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    return model


def given(engine, model) -> int:
    """Give an engine the weights of a model, under a new version."""
    version = next(VERSIONS)
    engine.load_weights(weights_of(engine, model), version)
    return version


def test_weights_arrive_while_requests_run_and_each_token_is_of_those_that_it_says(engine, reference, other):
    """What is there goes on under the new weights, which read all of it again."""
    params, rng = SamplingParams(max_tokens=50, stop_token_ids=(1, 2)), random.Random(4)
    requests = [Request(f"{p} {s}", PROMPTS[p], params, p, sample=s) for p in range(3) for s in range(3)]
    for wait_s in (0.02, 0.01, 0.005, 0.002, 0.001):  # until it is shorter than a response takes here
        models = {given(engine, reference): reference}
        alone = tokens(engine.generate([[5, 6]], params, [4]))
        stream, answers = engine.stream(lambda keys: True, runs_in_background=True), {}
        stream.submit(requests)
        for model in (other, reference):
            answers |= stream.collect(rng.uniform(0.2, 1) * wait_s)
            assert tokens(engine.generate([[5, 6]], params, [4])) == alone or model is reference
            models[given(engine, model)] = model
        answers |= collected(stream)
        assert answers.keys() == {request.key for request in requests}
        for request in requests:
            answer = answers[request.key]
            versions = answer.token_versions
            assert len(versions) == len(answer.token_ids) and versions == sorted(versions)
            assert answer.weight_version == versions[0]
            wanted = read_again_log_probs(models, request.prompt, answer.token_ids, versions)
            assert answer.log_probs == pytest.approx(wanted, abs=1e-4)
        if any(len(set(answer.token_versions)) > 1 for answer in answers.values()):
            break
    else:
        pytest.fail("no response has tokens of several weights")


def read_again_log_probs(models, prompt, response, versions):
    """Of a response whose token i was sampled by models[versions[i]], which read all that is before it."""
    said = {version: response_log_probs(models[version], prompt, response) for version in {*versions}}
    return [float(said[version][place]) for place, version in enumerate(versions)]


def continued(engine, cut_after: int, params: SamplingParams, load):
    """(tokens, log-probs, versions) of responses to LONG that are cut, and go on after `load`."""
    requests = [Request(f"{p} {s}", LONG[p], params, p, sample=s) for p in range(2) for s in range(2)]
    stream = engine.stream()
    stream.submit([replace(r, params=replace(params, max_tokens=cut_after)) for r in requests])
    first = dict(collected(stream))
    load()
    stream = engine.stream()
    stream.submit([resumed(request, first[request.key].token_ids) for request in requests])
    rest = dict(collected(stream))
    return [
        (a.token_ids + b.token_ids, a.log_probs + b.log_probs, a.token_versions + b.token_versions)
        for a, b in ((first[r.key], rest[r.key]) for r in requests)
    ]


LONG = [
    [(5 * position + 3) % 19 + 3 for position in range(20)],
    [(7 * position) % 20 + 2 for position in range(36)],
]


def test_after_new_weights_nothing_is_found_of_what_older_ones_had_read(
    engine, engine_name, reference, other
):
    """Log-probs of what goes on, and of what begins with the same tokens, are of the newer ones alone."""
    models = {given(engine, reference): reference}
    engine.drain_metrics()
    params = SamplingParams(max_tokens=25)
    found = continued(engine, 18, params, lambda: models.update({given(engine, other): other}))
    moved = 0.0
    for (ids, log_probs, versions), prompt in zip(found, [LONG[0], LONG[0], LONG[1], LONG[1]], strict=True):
        wanted = read_again_log_probs(models, prompt, ids, versions)
        assert log_probs == pytest.approx(wanted, abs=1e-4)
        older = response_log_probs(reference, prompt, ids).tolist()
        moved = max(moved, *(abs(a - b) for a, b in zip(wanted, older, strict=True)))
    assert moved > 0.05, "of older weights: it would not show"
    metrics = engine.drain_metrics().values()
    if engine_name.startswith("vllm"):
        read = [20 + 18 - 1] * 2 + [36 + 18 - 1] * 2
        assert metrics["rollout/reread_tokens"] == sum(read) - BLOCK, "two of a prompt share its first block"
    stream, wanted = engine.stream(), {}
    stream.submit([Request(p, prompt, params, p) for p, prompt in enumerate(LONG)])
    answers = dict(collected(stream))
    answers |= {("all", p): one for p, (one,) in enumerate(engine.generate(LONG, params, [0, 1]))}
    assert len(answers) == 4
    for key, one in answers.items():
        prompt = LONG[key if isinstance(key, int) else key[1]]
        expected = response_log_probs(other, prompt, one.token_ids)
        torch.testing.assert_close(torch.tensor(one.log_probs), expected, atol=1e-4, rtol=0)


def test_a_part_of_the_requests_is_paused(engine):
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    requests = [Request(key, [5, 6], params, number) for number, key in enumerate("abc")]
    expected = generated(engine, requests)
    stream = engine.stream(lambda keys: True)
    stream.submit(requests)
    answers = dict(stream.pause(["b"]))
    assert "b" in answers
    while stream.num_pending:
        answers |= dict(stream.collect(60.0))
    assert_same([(key, answers[key]) for key in "ac"], {key: expected[key] for key in "ac"})


def test_a_stream_of_nothing_answers_at_once(engine):
    stream = engine.stream()
    stream.submit([])
    assert stream.collect(100.0) == [] and stream.num_pending == 0


def test_a_request_that_cannot_run_fails_alone(engine):
    params = SamplingParams(max_tokens=4)
    good = [Request("first", [5], params, 0), Request("last", [6, 5], params, 1)]
    expected = generated(engine, good)
    stream = engine.stream()
    long, empty = Request("long", [6] * 64, params, 0), Request("empty", [], params, 0)
    stream.submit([good[0], long])
    stream.submit([empty])
    stream.submit([good[1], Request("foreign", [5, 1 << 20], params, 0)])
    assert stream.num_pending == 5
    with pytest.raises(RolloutError, match="'empty' is pending already"):
        stream.submit([empty])
    answers = dict(collected(stream))
    assert_same([(key, answers.pop(key)) for key in ("first", "last")], expected)
    assert {key: (type(failed), failed.kind) for key, failed in answers.items()} == dict.fromkeys(
        ("long", "empty", "foreign"), (EpisodeFailed, "request")
    )
    assert "'long' has 64 tokens" in str(answers["long"]) and "'empty' is empty" in str(answers["empty"])
    assert "'foreign' has token ids 5 to 1048576" in str(answers["foreign"])
    assert stream.collect(0.0) == [] and not stream.num_pending
    stream.submit([long])
    assert [key for key, _ in collected(stream)] == ["long"]


def test_requests_of_one_name_cannot_be_told_apart(engine):
    stream = engine.stream()
    params = SamplingParams(max_tokens=4)
    with pytest.raises(RolloutError, match="'good' is pending already"):
        stream.submit([Request("good", [5], params, 0), Request("good", [7], params, 0)])
    assert stream.num_pending == 0
    with pytest.raises(RolloutError, match="'many' asks for n=2"):
        Request("many", [5], SamplingParams(max_tokens=4, n=2), 0)


def test_while_requests_are_pending_the_engine_does_nothing_else(engine, reference):
    stream = engine.stream()
    stream.submit(requests_of())
    params = SamplingParams(max_tokens=2)
    for call in (
        lambda: engine.generate([[5]], params, [0]),
        lambda: engine.load_weights(weights_of(engine, reference), version=8),
        engine.sleep,
    ):
        with pytest.raises(RolloutError, match="5 requests of its stream are pending"):
            call()
    stream.close()
    stream.close()
    assert engine.weight_version == 7
    assert engine.generate([[5]], params, [0]) == engine.generate([[5]], params, [0])
    expected = generated(engine, requests_of())
    again = engine.stream()
    again.submit(requests_of())
    assert_same(collected(again), expected)


def test_a_stream_names_the_request_whose_log_probs_are_not_finite(engine, reference):
    weights = weights_of(engine, reference)
    broken = [(name, tensor * float("nan") if "norm" in name else tensor) for name, tensor in weights]
    engine.load_weights(broken, version=3)
    stream = engine.stream()
    stream.submit([Request("first", [5], SamplingParams(max_tokens=3), 0)])
    with pytest.raises(RolloutError, match="has log-probs that are not finite") as caught:
        collected(stream)
    assert "'first'" in str(caught.value)
    stream.close()


@pytest.mark.parametrize("engine_name", ["vllm", "sglang"], indirect=True)
def test_an_engine_of_its_own_process_holds_the_weights_that_were_sent(engine, reference):
    for name in ("model.embed_tokens.weight", "model.layers.1.input_layernorm.weight", "model.norm.weight"):
        (held,) = engine.read_tensor(name)
        sent = reference.get_parameter(name)
        assert torch.equal(held[: len(sent)], sent), name
