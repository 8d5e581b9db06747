"""Rollout engines sample from a vision model what plain Hugging Face would, whatever else is in the batch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import vision_cases as vision
from proven_models import SAMPLED, record
from recorded_cases import case_of, type_of
from safetensors.torch import load_file
from train_engine_cases import Scenario

from siirl.compiler.plan import ModelPlan
from siirl.config import load_config
from siirl.data.completions import Completion, Request, SamplingParams
from siirl.data.image_reader import ImageReader
from siirl.data.seen import Seen
from siirl.engines.engine_registry import make_rollout_engine
from siirl.engines.rollout.vllm.vllm_rollout import VLLMRollout
from siirl.parallel.dims import ParallelDims

SEEN = [(vision.SMALL,), (vision.WIDE,), (vision.OTHER,), (), (vision.WIDE, vision.TALL), (vision.WIDE,)]
SEEDS = [1, 2, 3, 4, 5, 6]
HOT = 2.0
"""A temperature at which all tokens are sampled, that of images too."""
PAGE = vision.image(200, 200, 4)
"""An image that takes 16 tokens."""
OF_ENGINE = {
    "hf": ["actor_rollout_ref.rollout.max_num_batched_tokens=64"],
    "vllm": [
        "actor_rollout_ref.rollout.prompt_length=128",
        "actor_rollout_ref.rollout.response_length=16",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.block_size=32",
    ],
}


@pytest.fixture(scope="module", params=vision.KINDS)
def folder(request, tmp_path_factory) -> Path:
    return vision.make_vision_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module", params=["hf", pytest.param("vllm", marks=pytest.mark.slow)])
def engine(request, folder, tmp_path_factory):
    name = request.param
    cfg = load_config(
        [
            "data.dataset_type=vlm",
            f"actor_rollout_ref.rollout.name={name}",
            f"trainer.output_dir={tmp_path_factory.mktemp('run')}",
            *OF_ENGINE[name],
            "actor_rollout_ref.rollout.dtype=float32",
            f"actor_rollout_ref.model.path={folder}",
        ]
    )
    plan = ModelPlan(
        "agent_0.rollout", 0, "rollout", name, "lm", False, (0,), ParallelDims(1), "rollout_actor", ()
    )
    engine = make_rollout_engine(plan, cfg, None, torch.device("cpu"))
    stored = load_file(folder / "model.safetensors")
    assert {name: tuple(x.shape) for name, x in stored.items()} == {
        name: shape for name, (shape, _) in engine.weight_specs().items()
    }
    engine.load_weights(stored.items(), 3)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def prompts(folder) -> list[list[int]]:
    reader = ImageReader(str(folder))
    return [vision.prompt_of(reader, seen) for seen in SEEN]


@pytest.fixture(scope="module")
def placed(folder, prompts) -> list[Seen]:
    reader = ImageReader(str(folder))
    return [vision.seen_in(reader, *one) for one in zip(prompts, SEEN, strict=True)]


@pytest.fixture(scope="module")
def reference(folder):
    return vision.hf_model(folder)


def log_probs(
    reference: Any, folder: Path, prompt: list[int], seen: tuple[str, ...], answer: list[int]
) -> list[float]:
    """Of the tokens of an answer, by plain Hugging Face."""
    inputs = vision.hf_inputs(folder, prompt, answer, list(seen))
    with torch.no_grad():
        logits = reference(**inputs).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / HOT, dim=-1).gather(-1, torch.tensor(answer)[:, None])[:, 0].tolist()


def test_log_probs_are_those_of_hugging_face_and_tokens_do_not_depend_on_the_batch(
    reference, folder, engine, prompts, placed
):
    params = SamplingParams(max_tokens=6, n=8, temperature=HOT, ignore_eos=True)
    found, gaps = engine.generate(prompts, params, SEEDS, placed), []
    assert vision.IMAGE in {token for one in found for sample in one for token in sample.token_ids}
    for prompt, seen, samples in zip(prompts, SEEN, found, strict=True):
        for sample in (one for one in samples if vision.TWIN not in one.token_ids[:-1]):
            wanted = log_probs(reference, folder, prompt, seen, sample.token_ids)
            assert sample.log_probs == pytest.approx(wanted, abs=1e-5)
            gaps += [abs(ours - theirs) for ours, theirs in zip(sample.log_probs, wanted, strict=True)]
    if isinstance(engine, VLLMRollout):
        record(case_of(type_of(folder), Scenario("", 1), SAMPLED), max(gaps))
    for index in (2, 4):
        (alone,) = engine.generate([prompts[index]], params, [SEEDS[index]], [placed[index]])
        assert tokens(alone) == tokens(found[index])
    assert tokens(found[1]) != tokens(found[2]), "the same tokens with other images"


def tokens(samples: list[Completion]) -> list[list[int]]:
    return [sample.token_ids for sample in samples]


def test_a_response_goes_on_behind_its_images(reference, folder, engine, prompts, placed):
    """As if it had not stopped; also behind a sampled token of an image, which is none of the prompt's."""
    params = SamplingParams(max_tokens=6, temperature=HOT, ignore_eos=True)
    whole = [one for (one,) in engine.generate(prompts, params, SEEDS, placed)]
    rest, stream, begun = replace(params, max_tokens=3), engine.stream(), [9, vision.IMAGE, 11]
    for row, (prompt, one) in enumerate(zip(prompts, whole, strict=True)):
        for key, tokens in ((f"{row} again", one.token_ids[:3]), (f"{row} other", begun)):
            stream.submit([Request(key, [*prompt, *tokens], rest, SEEDS[row], start=3, seen=placed[row])])
    found: dict = {}
    while stream.num_pending:
        found |= dict(stream.collect(30.0))
    stream.close()
    for row, (prompt, seen, one) in enumerate(zip(prompts, SEEN, whole, strict=True)):
        again, other = found[f"{row} again"], found[f"{row} other"]
        assert again.token_ids == one.token_ids[3:]
        assert again.log_probs == pytest.approx(one.log_probs[3:], abs=1e-5)
        if vision.TWIN not in other.token_ids[:-1]:
            wanted = log_probs(reference, folder, prompt, seen, [*begun, *other.token_ids])
            assert other.log_probs == pytest.approx(wanted[3:], abs=1e-5)


def test_greedy_tokens_are_those_that_hugging_face_generates(reference, folder, engine, prompts, placed):
    found = engine.generate(prompts, SamplingParams(max_tokens=5, temperature=0.0), SEEDS, placed)
    for prompt, seen, (sample,) in zip(prompts, SEEN, found, strict=True):
        answer: list[int] = []
        for _ in range(5):
            inputs = vision.hf_inputs(folder, prompt, answer, list(seen))
            with torch.no_grad():
                answer.append(int(reference(**inputs).logits[0, -1].argmax()))
        assert sample.token_ids == answer


def test_equal_tokens_with_other_images_share_no_cache(reference, folder, engine):
    reader, other = ImageReader(str(folder)), vision.image(200, 200, 5)
    params, prompt = SamplingParams(max_tokens=2, temperature=HOT), []
    for seen in ((PAGE, PAGE, PAGE), (other, PAGE, PAGE), (PAGE, PAGE, other), (PAGE, PAGE, PAGE)):
        prompt = vision.prompt_of(reader, seen)
        ((sample,),) = engine.generate([prompt], params, [7], [vision.seen_in(reader, prompt, seen)])
        wanted = log_probs(reference, folder, prompt, seen, sample.token_ids)
        assert sample.log_probs == pytest.approx(wanted, abs=1e-5)
    assert len(prompt) > 32


def test_images_are_read_again_by_new_weights_of_the_tower(reference, folder, engine, prompts, placed):
    stored = load_file(folder / "model.safetensors")
    moved = {name: tensor * 1.3 if "visual" in name else tensor for name, tensor in stored.items()}
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)

    def sampled() -> list[Completion]:
        return [one for (one,) in engine.generate(prompts, params, SEEDS, placed)]

    before = sampled()
    engine.load_weights(moved.items(), 4)
    after = sampled()
    engine.load_weights(stored.items(), 5)
    again = sampled()
    assert [one.log_probs for one in again] == [one.log_probs for one in before]
    model = vision.hf_model(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(1.3 if "visual" in name else 1.0)
    for prompt, seen, sample in zip(prompts, SEEN, after, strict=True):
        with torch.no_grad():
            logits = model(**vision.hf_inputs(folder, prompt, sample.token_ids, list(seen))).logits[0]
        wanted = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
        found = wanted.gather(-1, torch.tensor(sample.token_ids)[:, None])[:, 0].tolist()
        assert sample.log_probs == pytest.approx(found, abs=1e-5)
