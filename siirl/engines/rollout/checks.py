"""What every rollout engine checks of a call and of its result."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from siirl.engines.rollout.base import Completion, SamplingParams
from siirl.errors import RolloutError

WeightState = Literal["empty", "loading", "ready", "asleep"]
"""Of an engine's weights: never synced; a sync began and did not complete; complete; given back by sleep."""

_NO_WEIGHTS = {
    "empty": "none have arrived yet",
    "loading": "the last sync did not complete",
    "asleep": "it sleeps, and gave them back",
}


@dataclass(frozen=True)
class CallLimits:
    """What an engine can take: name for messages, vocabulary size, positions of prompt and response."""

    name: str
    vocab: int
    max_context: int

    def check(
        self,
        state: WeightState,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        seeds: Sequence[int],
    ) -> None:
        """RolloutError unless the engine has weights and can run every prompt."""
        if state != "ready":
            raise RolloutError(
                f"rollout engine {self.name!r} has no usable weights: {_NO_WEIGHTS[state]}. "
                "Sync weights before generating."
            )
        if len(seeds) != len(prompts):
            raise RolloutError(f"{len(prompts)} prompts and {len(seeds)} seeds: each prompt needs one seed.")
        for index, prompt in enumerate(prompts):
            if not len(prompt):
                raise RolloutError(f"prompt {index} is empty: there is nothing to continue. Remove it.")
            low, high = min(prompt), max(prompt)
            if low < 0 or high >= self.vocab:
                raise RolloutError(
                    f"prompt {index} has token ids {low} to {high}, the model knows 0 to {self.vocab - 1}: "
                    "tokenizer and model do not belong together. Use the model's own tokenizer."
                )
            if len(prompt) + params.max_tokens > self.max_context:
                raise RolloutError(
                    f"prompt {index} has {len(prompt)} tokens and its response up to {params.max_tokens}: "
                    f"rollout engine {self.name!r} has {self.max_context} positions. Lower "
                    "data.max_prompt_length or data.max_response_length, or use a model of longer context."
                )


def check_finite(samples: Iterable[tuple[int, int, Completion]], dtype: str) -> None:
    """RolloutError for a (prompt, sample, completion) with a log-prob that is NaN or minus infinity."""
    for call, sample, completion in samples:
        total = sum(completion.log_probs)
        if total != total or total == float("-inf"):
            raise RolloutError(
                f"sample {sample} of prompt {call} has log-probs that are not finite, at weight version "
                f"{completion.weight_version}: the weights overflow in {dtype}, or hold NaN. "
                "Lower the learning rate, or set actor_rollout_ref.rollout.dtype=float32."
            )
