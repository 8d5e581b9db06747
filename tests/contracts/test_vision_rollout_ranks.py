"""A vLLM engine of two ranks samples from a vision model what plain Hugging Face would, tower included."""

from pathlib import Path

import pytest
import torch
import vision_cases as vision
from dist_harness import run_workers
from later import needed
from safetensors.torch import load_file
from test_vision_rollout import HOT, SEEDS, SEEN, log_probs

from siirl.compiler.plan import ModelPlan
from siirl.config import load_config
from siirl.data.completions import Completion, SamplingParams
from siirl.data.image_reader import ImageReader
from siirl.engines.engine_registry import make_rollout_engine
from siirl.parallel.dims import ParallelDims
from siirl.parallel.process_groups import ProcessGroupManager

needed("vllm")

ROLLOUT = "actor_rollout_ref.rollout"
HOTTEST = SamplingParams(max_tokens=6, n=2, temperature=HOT, ignore_eos=True)
MOVED = 1.3
"""What the weights of a tower are multiplied with for the second update."""


def sampled(rank: int, world: int, folder: str, out: str, tensor: int) -> list[list[list[Completion]]]:
    """By the first weights, by others of the tower, and by the first again."""
    keys = [
        *(
            f"{ROLLOUT}.name=vllm",
            f"{ROLLOUT}.dtype=float32",
            f"{ROLLOUT}.tensor_model_parallel_size={tensor}",
        ),
        *(f"{ROLLOUT}.prompt_length=128", f"{ROLLOUT}.response_length=16", "data.dataset_type=vlm"),
        *(f"actor_rollout_ref.model.path={folder}", f"trainer.output_dir={out}", "trainer.device=cpu"),
    ]
    ranks = tuple(range(world))
    dims = ParallelDims(world, tp=tensor)
    plan = ModelPlan("agent_0.rollout", 0, "rollout", "vllm", "lm", False, ranks, dims, "rollout_actor", ())
    groups = ProcessGroupManager([ranks], "gloo", 200)
    engine = make_rollout_engine(plan, load_config(keys), groups, torch.device("cpu"))
    reader, stored = ImageReader(folder), load_file(Path(folder) / "model.safetensors")
    moved = {name: x * MOVED if "visual" in name else x for name, x in stored.items()}
    prompts = [vision.prompt_of(reader, seen) for seen in SEEN]
    placed = [vision.seen_in(reader, *one) for one in zip(prompts, SEEN, strict=True)]
    found = []
    try:
        for version, weights in enumerate((stored, moved, stored)):
            engine.load_weights(weights.items(), version)
            found.append(engine.generate(prompts, HOTTEST, SEEDS, placed))
    finally:
        engine.close()
    return found


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("kind", vision.KINDS)
def test_an_engine_of_two_ranks_says_what_hugging_face_does_after_each_update(kind, tmp_path):
    folder = vision.make_vision_model(tmp_path / kind, kind)
    (first, moved, again), _ = run_workers(sampled, 2, str(folder), str(tmp_path / "out"), 2, deadline_s=400)
    model, reader = vision.hf_model(folder), ImageReader(str(folder))
    for found, factor in ((first, 1.0), (moved, MOVED)):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.mul_(factor if "visual" in name else 1.0)
        for seen, samples in zip(SEEN, found, strict=True):
            prompt = vision.prompt_of(reader, seen)
            for sample in (one for one in samples if vision.TWIN not in one.token_ids[:-1]):
                wanted = log_probs(model, folder, prompt, seen, sample.token_ids)
                assert sample.log_probs == pytest.approx(wanted, abs=1e-5)
    tokens = [[one.token_ids for one in samples] for samples in first]
    assert tokens == [[one.token_ids for one in samples] for samples in again]
    assert str(moved) != str(first)
