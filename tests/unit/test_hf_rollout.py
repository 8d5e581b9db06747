"""What is particular to the HF engine: passes, prefill blocks, the cache, dtypes, architectures."""

import dataclasses
import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from fixtures_tiny import make_tiny_model_dir
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV2Config, Gemma2Config, GptOssConfig

from siirl.config import load_config
from siirl.dag.plan import InteractionPlan, ModelPlan
from siirl.engines.rollout import decode, hf, hf_stream, kv_cache, sampling, slots
from siirl.engines.rollout.base import Request, SamplingParams
from siirl.engines.rollout.hf import HFRollout
from siirl.engines.rollout.weights import stored_parts
from siirl.errors import ConfigError, DataError, NotSupportedError
from siirl.nodes.streams import Streams
from siirl.parallel.dims import ParallelDims

pytestmark = pytest.mark.heavy

VOCAB = 24
PLAN = ModelPlan("agent_0.rollout", 0, "rollout", "hf", "lm", False, (0,), ParallelDims(1), "rollout", ())
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [11], [5, 6, 7], [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]]
SAMPLED = SamplingParams(max_tokens=24, n=3, stop_token_ids=(4, 9))
GREEDY = SamplingParams(max_tokens=24, temperature=0)


def build(path, *overrides, dtype="float32"):
    cfg = load_config(
        [
            "actor_rollout_ref.rollout.name=hf",
            f"actor_rollout_ref.model.path={path}",
            f"actor_rollout_ref.rollout.dtype={dtype}",
            *overrides,
        ]
    )
    return HFRollout(PLAN, cfg, None, "cpu")


def loaded(path, *overrides, dtype="float32"):
    engine = build(path, *overrides, dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    engine.load_weights(stored_parts(model).items(), version=0)
    return engine


def tokens(engine, params=SAMPLED):
    return [[s.token_ids for s in prompt] for prompt in engine.generate(PROMPTS, params, range(5))]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    return make_tiny_model_dir(path, vocab=VOCAB, init_std=0.3, tokenizer=False)


@pytest.fixture(scope="module")
def expected(model_dir):
    return tokens(loaded(model_dir))


@pytest.mark.parametrize(
    "override",
    ["max_num_seqs=1", "max_num_seqs=4", "micro_batch_size=2", "max_num_batched_tokens=8"],
)
def test_passes_and_prefill_blocks_do_not_change_samples(model_dir, expected, override):
    assert tokens(loaded(model_dir, f"actor_rollout_ref.rollout.{override}")) == expected


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        (kv_cache, "GROWTH", 1),
        (decode, "KEEP_SHARE", 1.0),
        (decode, "KEEP_SHARE", 0.0),
        (decode, "CHECK_EVERY", {"cpu": 5}),
        (sampling, "_MAX_LOGITS", 30),
    ],
)
def test_tuning_does_not_change_samples(model_dir, expected, monkeypatch, module, name, value):
    monkeypatch.setattr(module, name, value)
    assert tokens(loaded(model_dir)) == expected


def streamed(engine, params=SAMPLED, at_first=2):
    """The first sample of each prompt, from a stream that the requests join one after another."""
    stream = engine.stream()
    one = dataclasses.replace(params, n=1)
    waiting = [Request(index, prompt, one, index) for index, prompt in enumerate(PROMPTS)]
    stream.submit(waiting[:at_first])
    answers, waiting = {}, waiting[at_first:]
    while waiting or stream.num_pending:
        answers |= dict(stream.collect(0.0))
        stream.submit(waiting[:1])
        waiting = waiting[1:]
    return [answers[index].token_ids for index in range(len(PROMPTS))]


@pytest.mark.parametrize(
    ("family", "extra", "words"),
    [
        (Gemma2Config, {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping=30.0"),
        (GptOssConfig, {"num_local_experts": 2, "num_experts_per_tok": 1}, "GptOssForCausalLM"),
    ],
)
def test_attention_that_would_be_computed_without_a_part_of_it_is_refused(tmp_path, family, extra, words):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    family(**sizes, **extra, num_key_value_heads=2, head_dim=16, vocab_size=VOCAB).save_pretrained(tmp_path)
    with pytest.raises(NotSupportedError, match=f"without plain softmax attention: .*{words}"):
        build(tmp_path)


@pytest.mark.parametrize("latent", [4, 12])  # what is cached as keys; as values: 8
def test_a_model_whose_keys_and_values_have_different_sizes_streams_what_it_generates(tmp_path, latent):
    sizes = {"kv_lora_rank": latent, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    sizes |= {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "v_head_dim": 10}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
    config = DeepseekV2Config(**sizes, **heads, **experts, vocab_size=VOCAB, initializer_range=0.3)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    alone = [prompt[0] for prompt in tokens(loaded(tmp_path))]
    assert streamed(loaded(tmp_path)) == alone


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        (slots, "GROWTH", 1),
        (slots, "CHEAP", 0),
        (slots, "MOST_SEEN", 40),
        (slots, "OTHERS_BETWEEN", 0.0),
        (hf_stream, "SLOTS_PER_ROW", 1),
        (hf_stream, "CHECK_EVERY", {"cpu": 5}),
    ],
)
def test_tuning_does_not_change_what_a_stream_says(model_dir, expected, monkeypatch, module, name, value):
    monkeypatch.setattr(module, name, value)
    assert streamed(loaded(model_dir)) == [samples[0] for samples in expected]


def test_a_stream_holds_no_more_rows_and_positions_than_there_is_room_for(model_dir, expected, monkeypatch):
    engine = loaded(model_dir, "actor_rollout_ref.rollout.max_num_seqs=3")
    steps = stream_steps(engine, monkeypatch)
    assert streamed(engine, at_first=5) == [samples[0] for samples in expected]
    assert steps[0] == (3, 3, 3 + 7 + 1) and max(rows for rows, _, _ in steps) == 3
    assert max(num_slots for _, num_slots, _ in steps) == 3
    room = hf_stream.Room(rows=10, positions=100)
    assert room.fits(4, 25) and not room.fits(4, 26) and room.fits(1, 1000) and not room.fits(11, 1)


def test_prompts_join_as_many_as_prefill_tokens_allow(model_dir, expected, monkeypatch):
    engine = loaded(model_dir, "actor_rollout_ref.rollout.max_num_batched_tokens=8")
    steps = stream_steps(engine, monkeypatch)
    assert streamed(engine, at_first=5) == [samples[0] for samples in expected]
    assert steps[0] == (1, 1, 3) and steps[1][0] == 3, "3 tokens, then 7 and 1; 3 of a prompt that runs"
    assert max(tokens - rows for rows, _, tokens in steps) < 8, "11 tokens are read in two forwards"


MIXED = [
    [2 + i * i % 19 for i in range(400)],
    *([2 + (7 * row + i) % 20 for i in range(20)] for row in range(16)),
]


def join_together(engine):
    """Have MIXED join a stream together, for one token each; it must be what `generate` says."""
    params = SamplingParams(max_tokens=1)
    alone = engine.generate(MIXED, params, range(len(MIXED)))
    stream = engine.stream()
    stream.submit([Request(i, prompt, params, i) for i, prompt in enumerate(MIXED)])
    said = dict(stream.collect(0.0))
    assert len(said) == len(MIXED)
    for index, (expected,) in enumerate(alone):
        assert said[index].token_ids == expected.token_ids
        assert said[index].log_probs == pytest.approx(expected.log_probs, abs=1e-5)


def test_a_long_prompt_that_joins_with_short_ones_costs_them_nothing(model_dir, monkeypatch):
    masks = mask_sizes(monkeypatch)
    join_together(loaded(model_dir))
    assert max(masks) <= 1 << 21, "all rows padded to the longest: 17 * 400 * 400 for each of 2 heads"


@pytest.mark.parametrize("bound", [20_000, 3_000])
def test_no_mask_is_larger_than_what_is_seen_at_once(model_dir, monkeypatch, bound):
    monkeypatch.setattr(slots, "MOST_SEEN", bound, raising=False)
    monkeypatch.setattr(slots, "CHEAP", 0, raising=False)
    masks = mask_sizes(monkeypatch)
    join_together(loaded(model_dir))
    assert bound // 2 < max(masks) <= bound


def test_a_stream_reads_equal_prompts_once_and_ended_rows_leave(model_dir, monkeypatch):
    engine = loaded(model_dir)
    steps = stream_steps(engine, monkeypatch)
    lengths = [3, 3, 10, 30, 30]
    finish(
        engine.stream(),
        [Request(i, PROMPTS[0], SamplingParams(max_tokens=length), i) for i, length in enumerate(lengths)],
    )
    assert [tokens for _, _, tokens in steps] == [3] + [5] * 2 + [3] * 7 + [2] * 20


def test_the_next_turn_reads_only_what_is_new(model_dir, monkeypatch):
    engine = loaded(model_dir)
    params = SamplingParams(max_tokens=6)
    stream, contexts = engine.stream(), {0: PROMPTS[0], 1: PROMPTS[1], 2: PROMPTS[4]}
    for turn in range(3):
        expected = [s.token_ids for (s,) in engine.generate(list(contexts.values()), params, [turn] * 3)]
        steps = stream_steps(engine, monkeypatch)
        said = finish(stream, [Request(key, context, params, turn) for key, context in contexts.items()])
        assert [said[key] for key in contexts] == expected
        new = 3 + 7 + 11 if turn == 0 else 3 * 3  # the last token that was said, and two that follow
        assert steps[0][2] == new
        contexts = {key: [*contexts[key], *said[key], 7, key] for key in (2, 0, 1)}
    assert engine.drain_metrics().values()["rollout/prefix_cache_hits"] > 0.4


def test_new_weights_read_a_prompt_again(model_dir, monkeypatch):
    engine = loaded(model_dir)
    params = SamplingParams(max_tokens=6)
    stream = engine.stream()
    context = [*PROMPTS[4], *finish(stream, [Request(0, PROMPTS[4], params, 0)])[0], 7]
    state = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).state_dict()
    engine.load_weights([(name, tensor * 0.5) for name, tensor in state.items()], version=0)
    ((expected,),) = engine.generate([context], params, [1])
    steps = stream_steps(engine, monkeypatch)
    assert finish(stream, [Request(0, context, params, 1)])[0] == expected.token_ids
    assert steps[0][2] == len(context)


def test_idle_slots_are_used_again(model_dir):
    engine = loaded(model_dir)
    stream = engine.stream()
    for number in range(12):
        finish(stream, [Request(number, [5, 6 + number], SamplingParams(max_tokens=5), number)])
    assert len(stream._batch._slots) <= 3, "a stream that never ends does not grow"


def test_a_cache_never_takes_more_than_there_is_room_for(model_dir, monkeypatch):
    engine, room = loaded(model_dir), hf_stream.Room(rows=10, positions=100)
    held = []
    keep = slots.SlotLayer._hold
    monkeypatch.setattr(slots.SlotLayer, "_hold", lambda layer, both: held.append(both) or keep(layer, both))
    engine._stream = stream = hf_stream.HFStream(engine, engine._model, room)
    few, some = SamplingParams(max_tokens=4), SamplingParams(max_tokens=20)
    context = [*PROMPTS[0]]
    for turn, (params, prompts) in enumerate(
        [(some, [PROMPTS[4]]), (few, PROMPTS), (some, PROMPTS[:3]), (few, [[5]] * 9), (some, PROMPTS[3:])]
    ):
        asked = [Request(i, prompt, params, i) for i, prompt in enumerate([context, *prompts])]
        said = finish(stream, asked)
        for request in asked:
            ((alone,),) = engine.generate([request.prompt], request.params, [request.seed])
            assert said[request.key] == alone.token_ids, f"turn {turn}"
        context += [*said[0][:3], 7]
    assert max(both.shape[1] * both.shape[3] for both in held) <= 100
    assert len(held) > 8, "it grew and shrank"


def test_a_stream_that_is_closed_gives_its_memory_back_at_once(model_dir):
    engine = loaded(model_dir)
    stream = engine.stream()
    gc.collect()
    gc.disable()
    try:
        finish(stream, [Request(0, PROMPTS[0], SamplingParams(max_tokens=3), 0)])
        buffers = [weakref.ref(layer.both) for layer in stream._batch._cache.layers]
        assert len(buffers) == 2 and all(buffer() is not None for buffer in buffers)
        stream.close()
        assert all(buffer() is None for buffer in buffers)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("agents", "others", "positions"), [(1, 0, 300), (1, 1, 300), (2, 0, 150), (3, 1, 100)]
)
def test_engines_of_a_conversation_share_what_its_weights_leave_free(
    model_dir, monkeypatch, agents, others, positions
):
    """600 positions are free once the engine is awake; the default takes half of them."""
    engines = {f"agent_{number}": build(model_dir) for number in range(agents)}
    names = [*engines, *(f"other_{number}" for number in range(others))]
    for name in names[agents:]:
        engines[name] = SimpleNamespace(stream=engines["agent_0"].new_stream)
    engines["agent_9"] = build(model_dir)  # of another conversation
    per_token, awake = hf._cache_bytes_per_token(engines["agent_0"]._model), threading.local()
    monkeypatch.setattr(hf.HFRollout, "wake", lambda engine: setattr(awake, "now", True))

    def free_bytes(device):
        return (600 if getattr(awake, "now", False) else 10_000) * per_token, 1 << 40

    monkeypatch.setattr(torch.cuda, "mem_get_info", free_bytes)
    for name in names[:agents]:
        engines[name]._device = torch.device("cuda")
    plan = InteractionPlan("rollout_0", (), tuple(names), 4)
    with Streams(plan, 0, engines, None, 10.0).open():
        pass
    found = [engines[name]._stream._room.positions for name in names[:agents]]
    assert found == [positions] * agents


def finish(stream, requests):
    """The tokens of each request's response, by key."""
    stream.submit(requests)
    answers = {}
    while stream.num_pending:
        answers |= dict(stream.collect(1.0))
    return {key: completion.token_ids for key, completion in answers.items()}


def mask_sizes(monkeypatch):
    """Elements of each mask that rows of a stream attend with from now on."""
    sizes = []

    def counted(*args, attn_mask, **kwargs):
        sizes.append(attn_mask.numel())
        return F.scaled_dot_product_attention(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(slots, "F", SimpleNamespace(scaled_dot_product_attention=counted))
    return sizes


def stream_steps(engine, monkeypatch):
    """[rows, slots, tokens] of each forward of a stream from now on."""
    steps = []
    forward = type(engine._model).forward

    def counted(**inputs):
        if "reading" in inputs:
            batch = engine._stream._batch
            steps.append((len(batch.rows), len(batch._slots), inputs["input_ids"].shape[1]))
        return forward(engine._model, **inputs)

    monkeypatch.setattr(engine._model, "forward", counted)
    return steps


def forward_shapes(engine, monkeypatch):
    """[rows, positions] of each forward from now on."""
    shapes = []
    forward = engine._model.forward
    monkeypatch.setattr(
        engine._model, "forward", lambda **kw: shapes.append(tuple(kw["input_ids"].shape)) or forward(**kw)
    )
    return shapes


def test_prompts_are_read_once_and_ended_rows_leave(model_dir, monkeypatch):
    engine = loaded(model_dir)
    shapes = forward_shapes(engine, monkeypatch)
    completions = engine.generate(PROMPTS, SAMPLED, range(5))
    assert shapes[0] == (4, 11), "four distinct prompts, not five, not fifteen rows"
    rows = [shape[0] for shape in shapes[1:]]
    assert rows[0] >= rows[-1] and rows[-1] < 15
    longest = max(len(sample.token_ids) for prompt in completions for sample in prompt)
    assert len(rows) == longest - 1, "no forward after the last token"


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
        ("mistral", {"sliding_window": 4}),
        ("mixtral", {"num_local_experts": 4, "sliding_window": None}),
    ],
)
def test_greedy_equals_transformers_on_other_architectures(tmp_path, monkeypatch, family, options):
    config = AutoConfig.for_model(
        family,
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        **options,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    engine = build(tmp_path)
    engine.load_weights(stored_parts(model).items(), version=0)
    for prompt, (response,) in zip(PROMPTS, tokens(engine, GREEDY), strict=True):
        full = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24, pad_token_id=0)
        assert response == full[0, len(prompt) :].tolist()
    assert streamed(engine, GREEDY) == [response for (response,) in tokens(engine, GREEDY)]
    monkeypatch.setattr(slots, "MOST_SEEN", 40)
    assert streamed(engine, GREEDY, at_first=5) == [response for (response,) in tokens(engine, GREEDY)]


@pytest.mark.parametrize(
    ("dtype", "expected_dtype"),
    [("bfloat16", torch.bfloat16), ("float32", torch.float32), ("auto", torch.bfloat16)],
)
def test_weights_have_the_dtype_that_was_asked_for(tmp_path, dtype, expected_dtype):
    path = make_tiny_model_dir(tmp_path, vocab=VOCAB, dtype="bfloat16", init_std=0.3, tokenizer=False)
    engine = loaded(path, dtype=dtype)
    assert {dtype for _, dtype in engine.weight_specs().values()} == {expected_dtype}
    assert all(len(sample) > 0 for prompt in tokens(engine) for sample in prompt)


def test_no_weight_file_is_needed_to_start(tmp_path):
    path = make_tiny_model_dir(tmp_path, vocab=VOCAB, weights=False, tokenizer=False)
    assert build(path).weight_version == -1


@pytest.mark.parametrize(
    ("family", "overrides", "error", "words"),
    [
        ("qwen3", ["actor_rollout_ref.rollout.tensor_model_parallel_size=2"], ConfigError, "one device"),
        ("qwen3", ["actor_rollout_ref.model.path=/does/not/exist"], DataError, "does not exist"),
        ("qwen3", ["actor_rollout_ref.model.path={tmp}/empty"], DataError, "config.json"),
        ("qwen3_next", [], NotSupportedError, "linear_attention"),
    ],
)
def test_what_cannot_run_is_refused(tmp_path, family, overrides, error, words):
    (tmp_path / "empty").mkdir()
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    with pytest.raises(error, match=words):
        build(tmp_path, *(override.format(tmp=tmp_path) for override in overrides))


def test_slots_exchange_what_they_hold_whatever_their_lengths():
    cache = slots.SlotCache()
    layer = slots.SlotLayer(cache)
    before = torch.arange(4 * 5.0).view(4, 1, 5, 1)
    layer.lazy_initialization(before, before)
    layer.make_room(num_slots=4, width=5)
    layer.both.copy_(torch.stack([before, before + 100]))
    cache.layers.append(layer)
    cache.exchange([(0, 3, 4), (1, 2, 5)], num_slots=4)
    for held, added in ((layer.keys, 0), (layer.values, 100)):
        assert torch.equal(held[0, :, :4], before[3, :, :4] + added)
        assert torch.equal(held[3, :, :4], before[0, :, :4] + added)
        assert torch.equal(held[2, :, :5], before[1] + added)
        assert torch.equal(held[1, :, :5], before[2] + added)
