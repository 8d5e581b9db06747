"""The experts that tokens were computed by, from vLLM's arrays to what a Completion has. Imports no vLLM."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from siirl.errors import RolloutError
from siirl.models.sizes import expert_layers

ARGUMENT = "enable_return_routed_experts"
"""Of vLLM's engine, from 0.24 on."""


def replayed_layers(arguments: Mapping[str, Any]) -> list[int] | None:
    """The layers whose experts an engine of these arguments says; None: it says none."""
    if not arguments.get(ARGUMENT):
        return None
    text = (Path(arguments["model"]) / "config.json").read_text(encoding="utf-8")
    return expert_layers({**json.loads(text), **arguments.get("hf_overrides", {})})


def experts_of(found: np.ndarray | None, layers: Sequence[int], num_tokens: int) -> bytes | None:
    """What Completion.experts is of a row of so many tokens; None of one that nothing was sampled of.

    found: [tokens but the last, layers of the model, experts of a token]; layers without experts have any
    numbers. RolloutError where it is of other tokens, and where the kernels of vLLM did not say.
    """
    if found is None or found.shape[0] != num_tokens - 1:
        size = "no experts" if found is None else f"experts of {found.shape[0]} tokens"
        raise RolloutError(
            f"vLLM gave {size} for a row of {num_tokens} tokens: it cannot be said which are of which. Set "
            "actor_rollout_ref.actor.router_replay.mode=disabled."
        )
    chosen_NLK = found[:, list(layers)]
    ordered_NLK = np.sort(chosen_NLK, axis=-1)
    if (ordered_NLK[..., 1:] == ordered_NLK[..., :-1]).any():
        raise RolloutError(
            "vLLM says of a token that one expert computed it twice: its kernel chooses experts by itself, "
            "and tells nobody. Choose another one by rollout.engine_kwargs.vllm.moe_backend, or set "
            "actor_rollout_ref.actor.router_replay.mode=disabled."
        )
    return np.ascontiguousarray(chosen_NLK.astype(np.int16)).tobytes()
