"""Seeds on both model runners of vLLM: Qwen2 has the first one on GPUs, Qwen3 the second."""

import pytest
import torch
from fixtures_tiny import make_tiny_model_dir
from gpu_share import IN_WORDS
from one_pass_draws import check_draws
from sampling_reference import next_token_log_probs, possible_cuts
from tf32_noise import tf32_noise
from transformers import AutoModelForCausalLM

from siirl.compiler.plan import ModelPlan
from siirl.config import load_config
from siirl.data.completions import Request, SamplingParams
from siirl.engines.engine_registry import make_rollout_engine
from siirl.engines.rollout.sampling import derive_seed, uniforms
from siirl.parallel.dims import ParallelDims

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(400),
]


@pytest.mark.parametrize("vocab", [1, 4097, 151936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws_in_one_pass_are_those_of_float64(vocab, dtype):
    check_draws(vocab, dtype, "cuda")


@pytest.fixture(scope="module", params=["qwen2", "qwen3"])
def engine_and_model(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp(request.param)
    shape = {"hidden": 128, "heads": 2, "kv_heads": 2, "head_dim": 64, "init_std": 0.1}
    path = make_tiny_model_dir(folder / "model", request.param, vocab=24, tokenizer=False, **shape)
    rollout = "actor_rollout_ref.rollout"
    cfg = load_config(
        [
            f"{rollout}.name=vllm",
            f"actor_rollout_ref.model.path={path}",
            f"{rollout}.dtype=float32",
            f"{rollout}.max_model_len=128",
            f"{rollout}.max_num_seqs=32",
            f"{rollout}.max_num_batched_tokens=64",
            *IN_WORDS,
            f"{rollout}.enforce_eager=True",
            f"trainer.output_dir={folder}/outputs",
        ]
    )
    plan = ModelPlan(
        "agent_0.rollout", 0, "rollout", "vllm", "lm", False, (0,), ParallelDims(1), "rollout", ()
    )
    engine = make_rollout_engine(plan, cfg, None, torch.device("cuda", 0))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().cuda()
    state = model.state_dict()
    engine.load_weights([(name, state[name]) for name in engine.weight_specs()], version=0)
    yield engine, model
    engine.close()


def how_far(uniform, token, probs):
    """Of a number that draws a token, from those of it; negative inside."""
    below = sum(prob for other, prob in probs.items() if other < token)
    return max(below - uniform, uniform - below - probs[token])


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, -1), (0.6, -1), (1.0, 3), (1.4, 5)])
def test_draws_are_those_of_the_seeds_also_when_prompts_are_read_in_parts(
    engine_and_model, temperature, top_k
):
    engine, model = engine_and_model
    prompts = [[(7 * row + place) % 20 + 2 for place in range(17 + row % 5)] for row in range(24)]
    params = SamplingParams(max_tokens=6, temperature=temperature, top_k=top_k)
    samples = [sample for (sample,) in engine.generate(prompts, params, range(24))]
    rows = [prompt + sample.token_ids for prompt, sample in zip(prompts, samples, strict=True)]
    noise = tf32_noise(model, rows) / temperature
    wrong, missed = [], []
    for row, sample in enumerate(samples):
        for place, (uniform,) in enumerate(uniforms([derive_seed(row, 0)], 6)):
            exact = next_token_log_probs(model, prompts[row] + sample.token_ids[:place], temperature)
            token = sample.token_ids[place]
            wrong.append(abs(sample.log_probs[place] - float(exact[token])))
            cuts = possible_cuts(exact, top_k, noise)  # which word is the last of top_k may be noise
            ways = [how_far(uniform, token, probs) for probs in cuts if token in probs]
            missed.append(min(ways, default=1.0))
    print(f"log-probs are {max(wrong):.4f} off, draws {max(missed):.4f}; TF32 may be {noise:.4f}")
    assert max(wrong) <= noise and max(missed) <= noise


def test_what_is_cut_goes_on_with_the_draws_that_follow(engine_and_model):
    engine, _ = engine_and_model
    prompts = [[row + 2, 5, 9] for row in range(8)]
    for row, prompt in enumerate(prompts):
        ((whole,),) = engine.generate([prompt], SamplingParams(max_tokens=9), [row])
        rest = SamplingParams(max_tokens=9 - row)
        stream = engine.stream()
        stream.submit([Request(row, [*prompt, *whole.token_ids[:row]], rest, row, start=row)])
        while not (answers := stream.collect(1.0)):
            assert stream.num_pending
        ((_, completion),) = answers
        assert completion.token_ids == whole.token_ids[row:], row
