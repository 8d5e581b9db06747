"""Rollout engines in processes of their own, as tests build, fill and lose them: of vLLM and of SGLang."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from siirl.compiler.plan import ModelPlan
from siirl.config import load_config
from siirl.data.completions import Completion, Request, SamplingParams
from siirl.engines.engine_registry import make_rollout_engine
from siirl.errors import RolloutError
from siirl.parallel.dims import ParallelDims
from siirl.parallel.process_groups import ProcessGroupManager

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [11], [2, 3, 4]]


def build(
    folder: Path,
    *keys: str,
    name: str = "vllm",
    device: str = "cpu",
    groups: ProcessGroupManager | None = None,
) -> Any:
    """An engine for the model of a directory, in float32 if keys do not say otherwise.

    With `groups` on all ranks of the world, which share it; else on one rank outside of a run.
    """
    cfg = load_config(
        [
            f"actor_rollout_ref.rollout.name={name}",
            f"actor_rollout_ref.model.path={folder}",
            "actor_rollout_ref.rollout.dtype=float32",
            "actor_rollout_ref.rollout.max_model_len=256",
            "trainer.deadline_s=240",
            f"trainer.output_dir={folder}/outputs",
            *keys,
        ]
    )
    ranks = tuple(range(groups.world_size if groups else 1))
    dims = ParallelDims(len(ranks), tp=len(ranks))
    plan = ModelPlan("agent_0.rollout", 0, "rollout", name, "lm", False, ranks, dims, "rollout_actor", ())
    return make_rollout_engine(plan, cfg, groups, torch.device(device))


def two_sets(folder: Path) -> list[dict[str, Tensor]]:
    """The weights of a directory, and others that tell."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    draw = torch.Generator().manual_seed(3)
    return [first, {name: t + 0.05 * torch.randn(t.shape, generator=draw) for name, t in first.items()}]


def load(engine: Any, weights: dict[str, Tensor], version: int) -> None:
    device = engine._device
    engine.load_weights([(name, weights[name].to(device)) for name in engine.weight_specs()], version)


def submitted(engine: Any, params: SamplingParams, prompts: Sequence[list[int]] = PROMPTS) -> Any:
    """A stream with a request for each prompt; keys and seeds count them."""
    stream = engine.stream()
    stream.submit([Request(key, prompt, params, key) for key, prompt in enumerate(prompts)])
    return stream


def streamed(
    engine: Any, params: SamplingParams, after_submit: Callable[[], object] = lambda: None
) -> dict[int, Completion]:
    """Answers of a stream by key."""
    stream, answers = submitted(engine, params), {}
    after_submit()
    while stream.num_pending:
        answers |= dict(stream.collect(0.5))
    return answers


def check_it_comes_back(
    engine: Any,
    params: SamplingParams,
    victims: Sequence[Callable[[], int]],
    check_same: Callable[[dict[int, Completion], dict[int, Completion]], None],
    held: Callable[[], object],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Lost while it streams, as often as it may be started again, it comes back as it was; then the run ends.

    victims: the process to kill, each time. held: what must be as before.
    """
    before, undisturbed, most = held(), streamed(engine, params), len(victims)
    for victim in victims:
        pid = engine._process.pid

        def kill_at_work(victim: Callable[[], int] = victim) -> None:
            time.sleep(0.1)
            os.kill(victim(), signal.SIGKILL)

        check_same(streamed(engine, params, kill_at_work), undisturbed)
        assert engine._process.pid != pid and engine.drain_restarts() == 1 and engine.drain_restarts() == 0
        assert held() == before
    assert "killed by SIGKILL" in caplog.text and f"started again ({most} of {most} times" in caplog.text
    os.kill(engine._process.pid, signal.SIGKILL)
    log = f"{engine.backend}_agent_0.rollout_rank_0.log"
    words = rf"killed by SIGKILL.*{log}, or raise .*max_engine_restarts"
    with pytest.raises(RolloutError, match=words):
        engine.generate(PROMPTS, params, range(4))
