"""A vLLM engine of two ranks on the CPU: its workers write what is theirs of each tensor where it belongs."""

import os

import pytest
from dist_harness import run_workers
from later import needed
from updated_engines import (
    IN_PLACE,
    PROMPTS,
    build,
    by_loaders,
    note_calls,
    samples,
    versions,
    write_model,
)
from worker_shares import check_parameters

from siirl.data.completions import SamplingParams
from siirl.engines.weights import in_place
from siirl.engines.weights.bucket import LiveWeights
from siirl.parallel.process_groups import ProcessGroupManager

needed("vllm")

KINDS = {
    "llama": {"tie_word_embeddings": False, "vocab_size": 70},
    "llama tied": {"tie_word_embeddings": True},
    "qwen2 tied": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False},
    "qwen3 tied": {"tie_word_embeddings": True, "vocab_size": 70},
    "qwen3, a head for both": {"tie_word_embeddings": False, "num_key_value_heads": 1},
    "qwen3_moe": {"tie_word_embeddings": False},
    "gemma3_text": {"vocab_size": 70},
}
"""Of 70 words the second worker has six, and rows of padding. qwen2 has biases. One head of keys and values
is whole on both."""
UNABLE = """
import importlib.abc
import importlib.machinery
import sys

NAME = "siirl.engines.rollout.vllm.native_places"

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name != NAME:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        check = module.ParameterMap.check

        def unable(places):
            from vllm.distributed import get_tensor_model_parallel_rank

            check(places)
            if get_tensor_model_parallel_rank() == 1:
                places.why_not = "the second worker does not know"

        module.ParameterMap.check = unable

sys.meta_path.insert(0, Finder())
"""
"""Code that each Python process runs first."""


def answers(engine):
    greedy = SamplingParams(max_tokens=24, temperature=0)
    rows = engine.generate(PROMPTS, greedy, range(len(PROMPTS)))
    return samples(engine), [(row[0].token_ids, row[0].log_probs) for row in rows]


def updated(rank, world_size, folder):
    """Updates by loaders, then in place, of one engine; the calls that it got in the second half."""
    patch = pytest.MonkeyPatch()
    sets, methods = versions(folder, 4), note_calls(patch)
    engine = build(folder, groups=ProcessGroupManager([(0, 1)], "gloo", 200))
    try:
        expected = []
        for version, weights in enumerate(sets):
            by_loaders(engine, weights, version)
            expected.append(answers(engine))
        assert len({str(one) for one in expected}) == len(sets) and "write" not in methods
        engine.load_weights(sets[0].items(), 10)
        methods.clear()
        patch.setattr(in_place, "BUCKET_BYTES", 9000)  # large tensors are cut, small ones joined
        for version, weights in enumerate(sets[1:], 1):
            patch.setattr(engine._weights._writer, "_whole", version == 2)
            engine.load_weights(LiveWeights(weights) if version == 3 else weights.items(), 10 + version)
            assert answers(engine) == expected[version]
            if rank == 0:
                check_parameters(engine, weights, folder)
        return methods, engine._weights._told_why
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", KINDS)
def test_each_worker_writes_its_share_of_every_tensor(kind, tmp_path):
    write_model(tmp_path, kind.split()[0].strip(","), **KINDS[kind])
    (methods, why_not), (_, told) = run_workers(updated, 2, tmp_path, deadline_s=300)
    assert set(methods) - {"read_tensor"} == set(IN_PLACE) and methods.count("write") > 6, why_not
    assert why_not == told == ""


def loaded(rank, world_size, folder):
    """Two updates of an engine of which one worker cannot write in place."""
    sets, methods = versions(folder, 2), note_calls(pytest.MonkeyPatch())
    engine = build(folder, groups=ProcessGroupManager([(0, 1)], "gloo", 200))
    try:
        for version, weights in enumerate(sets):
            engine.load_weights(weights.items(), version)
            answers(engine)
            if rank == 0:
                check_parameters(engine, weights, folder)
        return methods, engine._weights._told_why
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_one_worker_that_cannot_has_all_take_the_way_of_the_loaders(tmp_path, monkeypatch):
    write_model(tmp_path / "model", "qwen3")
    (tmp_path / "sitecustomize.py").write_text(UNABLE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    ended = run_workers(loaded, 2, tmp_path / "model", deadline_s=300)
    assert {why_not for _, why_not in ended} == {"the second worker does not know"}
    assert "write" not in ended[0][0] and ended[0][0].count("update") == 2
