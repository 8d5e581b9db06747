"""What is particular to the HF engine: passes, prefill blocks, the cache, dtypes, architectures."""

from types import SimpleNamespace

import causal_lms
import pytest
import torch
from fixtures_tiny import make_tiny_model_dir
from transformers import AutoConfig, AutoModelForCausalLM, BloomConfig

from siirl.compiler.plan import InteractionPlan, ModelPlan
from siirl.config import load_config
from siirl.data.completions import SamplingParams
from siirl.engines.rollout import sampling
from siirl.engines.rollout.hf import decode, hf_rollout, kv_cache
from siirl.engines.rollout.hf.hf_rollout import HFRollout
from siirl.engines.weights.target import stored_tensors_of
from siirl.errors import ConfigError, DataError, NotSupportedError
from siirl.models.families import types_with
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
    engine.load_weights(stored_tensors_of(model).items(), version=0)
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


@pytest.mark.parametrize(
    ("family", "extra", "words"),
    [
        (BloomConfig, {}, "BloomForCausalLM"),
    ],
)
def test_attention_that_would_be_computed_without_a_part_of_it_is_refused(tmp_path, family, extra, words):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    family(**sizes, **extra, num_key_value_heads=2, head_dim=16, vocab_size=VOCAB).save_pretrained(tmp_path)
    with pytest.raises(NotSupportedError, match=f"without plain softmax attention: .*{words}"):
        build(tmp_path)


@pytest.mark.parametrize("kind", [*types_with(lambda row: row.has_states), "gemma2"])
def test_states_and_keys_of_padded_prompts_are_repeated_and_dropped_with_their_rows(tmp_path, kind):
    """Three samples of each prompt, in two blocks of prompts, which end at other steps."""
    window = {"sliding_window": 5} if kind == "gemma2" else {}
    causal_lms.write_model(tmp_path, causal_lms.tiny_config(kind, **window))
    engine = loaded(tmp_path, "actor_rollout_ref.rollout.max_num_batched_tokens=24")
    read = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, **read).eval()
    params = SamplingParams(max_tokens=24, n=3, stop_token_ids=tuple(range(12)))
    lengths = set()
    for prompt, samples in zip(PROMPTS, engine.generate(PROMPTS, params, range(5)), strict=True):
        for sample in samples:
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *sample.token_ids]])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1).gather(-1, torch.tensor(sample.token_ids)[:, None])[:, 0]
            assert (torch.tensor(sample.log_probs) - expected).abs().max() < 1e-5
            lengths.add(len(sample.token_ids))
    assert len(lengths) > 4, "rows that end together"


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
    with Streams(InteractionPlan("rollout_0", (), tuple(names), 4), 0, engines, None, 10.0).open():
        pass
    free_bytes = 600 * hf_rollout._cache_bytes_per_row(engines["agent_0"]._model, 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes, 1 << 40))
    for name in names[:agents]:
        engines[name]._device = torch.device("cuda")
        assert engines[name]._rows_per_pass(1, 10) == positions // 10


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
    engine.load_weights(stored_tensors_of(model).items(), version=0)
    for prompt, (response,) in zip(PROMPTS, tokens(engine, GREEDY), strict=True):
        full = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24, pad_token_id=0)
        assert response == full[0, len(prompt) :].tolist()


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
        ("falcon_h1", [], NotSupportedError, "hybrid"),
    ],
)
def test_what_cannot_run_is_refused(tmp_path, family, overrides, error, words):
    (tmp_path / "empty").mkdir()
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    with pytest.raises(error, match=words):
        build(tmp_path, *(override.format(tmp=tmp_path) for override in overrides))
