"""A vLLM engine that takes one set of weights after another, by vLLM's loaders or in place."""

from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import causal_lms
import pytest
import served_engines
import torch
from served_engines import PROMPTS
from torch import Tensor
from transformers import AutoModelForCausalLM

from siirl.data.completions import SamplingParams
from siirl.engines.rollout.served.messages import Call
from siirl.engines.rollout.served.recovery import RecoveringEngine
from siirl.engines.weights.engine_loader import EngineWeights
from siirl.engines.weights.target import stored_tensors_of, tensor_names
from siirl.parallel.process_groups import ProcessGroupManager

SIZES = {"head_dim": 32, "hidden_size": 128, "max_position_embeddings": 128}
LOADERS: WeakKeyDictionary[Any, EngineWeights] = WeakKeyDictionary()
IN_PLACE = ["begin_writing", "write", "finish_writing"]


def write_model(folder: Path, kind: str, **sizes: Any) -> None:
    """A model's directory; its weights are random, and another kind of model has other ones."""
    causal_lms.write_model(folder, causal_lms.tiny_config(kind, **SIZES | sizes))


def build(folder: Path, *keys: str, device: str = "cpu", groups: ProcessGroupManager | None = None) -> Any:
    """An engine whose weights are written in place, for rows that fit SIZES; groups: see served_engines."""
    own = ("actor_rollout_ref.rollout.max_model_len=64", "actor_rollout_ref.rollout.replace_weights=in_place")
    return served_engines.build(folder, *own, *keys, device=device, groups=groups)


def versions(folder: Path, count: int, device: str = "cpu") -> list[dict[str, Tensor]]:
    """Sets of weights under the names of the files, in fp32; each tensor is another in each of them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    specs, _ = tensor_names(model)
    stored = stored_tensors_of(model)
    draw = torch.Generator().manual_seed(7)
    return [
        {
            name: (stored[name].detach() + 0.2 * torch.randn(stored[name].shape, generator=draw)).to(device)
            for name in specs
        }
        for _ in range(count)
    ]


def note_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the calls to engines from here on, in their order."""
    called, held = [], RecoveringEngine._held

    def noting(engine, act):
        def noted(process):
            ask, post = process.ask, process.post

            def noted_as(way, message):
                if isinstance(message, Call):
                    called.append(message.method)
                return way(message)

            process.ask, process.post = partial(noted_as, ask), partial(noted_as, post)
            try:
                return act(process)
            finally:
                del process.ask, process.post

        return held(engine, noted)

    monkeypatch.setattr(RecoveringEngine, "_held", noting)
    return called


def samples(engine: Any, max_tokens: int = 24) -> list[list[tuple[list[int], list[float]]]]:
    """Tokens and log-probs of what it samples."""
    rows = engine.generate(PROMPTS, SamplingParams(max_tokens=max_tokens), range(len(PROMPTS)))
    return [[(one.token_ids, one.log_probs) for one in row] for row in rows]


def by_loaders(engine: Any, weights: dict[str, Tensor], version: int) -> None:
    """An update by vLLM's loaders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_weights", loaders_of(engine))
        engine.load_weights(weights.items(), version)


def loaders_of(engine: Any) -> EngineWeights:
    """What an engine has with replace_weights=by_loaders; one for each, which may have to come back."""
    if engine not in LOADERS:
        parts = (engine.name, engine._specs, engine._device, engine._restarts > 0, engine._shard)
        LOADERS[engine] = EngineWeights(*parts)
    return LOADERS[engine]
