"""What every rollout engine checks of a call and of its result."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PretrainedConfig

from siirl.config import Config
from siirl.data.completions import Completion, Key, Request, SamplingParams
from siirl.engines.rollout.base import check_keys
from siirl.errors import EpisodeFailed, RolloutError
from siirl.models.families import family_of
from siirl.models.sizes import head_size

WeightState = Literal["empty", "loading", "ready", "sleeping"]
"""Of an engine's weights: never synced; a sync began and did not complete; complete; given back by sleep."""

COMPLETE = {"stop", "length"}
"""How responses end."""

_NO_WEIGHTS = {
    "empty": "none have arrived yet",
    "loading": "the last sync did not complete",
    "sleeping": "it sleeps, and gave them back",
}


@dataclass(frozen=True)
class CallLimits:
    """What an engine can take."""

    name: str
    """The engine's, for messages."""
    vocab: int
    """Size of the vocabulary."""
    max_context: int
    """Positions of prompt and response together."""

    def check_requests(
        self, state: WeightState, requests: Sequence[Request], pending: Iterable[Key]
    ) -> dict[Key, EpisodeFailed]:
        """The requests of a stream whose prompts cannot run, with the reason. pending: keys of those before.

        RolloutError without weights, and for a key that is used twice.
        """
        self.check_weights(state)
        check_keys(requests, pending)
        refused: dict[Key, EpisodeFailed] = {}
        fitting = None
        for request in requests:
            if fitting is not None and request.prompt is fitting.prompt and request.params is fitting.params:
                continue  # one more sample of it
            try:
                self.check_prompt(f"prompt of request {request.key!r}", request.prompt, request.params)
                fitting = request
            except RolloutError as error:
                refused[request.key] = EpisodeFailed(str(error), kind="request")
        return refused

    def check_weights(self, state: WeightState) -> None:
        """RolloutError unless a sync has completed."""
        if state != "ready":
            raise RolloutError(
                f"rollout engine {self.name!r} has no usable weights: {_NO_WEIGHTS[state]}. "
                "Sync weights before generating."
            )

    def check_prompt(self, who: str, prompt: Sequence[int], params: SamplingParams) -> None:
        """RolloutError if the prompt is empty, too long, or has unknown tokens. who: its name in messages."""
        if not len(prompt):
            raise RolloutError(f"{who} is empty: there is nothing to continue. Remove it.")
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= self.vocab:
            raise RolloutError(
                f"{who} has token ids {low} to {high}, the model knows 0 to {self.vocab - 1}: "
                "tokenizer and model do not belong together. Use the model's own tokenizer."
            )
        if len(prompt) + params.max_tokens > self.max_context:
            raise RolloutError(
                f"{who} has {len(prompt)} tokens and its response up to {params.max_tokens}: "
                f"rollout engine {self.name!r} has {self.max_context} positions. Lower "
                "data.max_prompt_length or data.max_response_length, or use a model of longer context."
            )


def check_finite(samples: Iterable[tuple[str, Completion]], dtype: str) -> None:
    """RolloutError for a completion, given with its name, whose log-probs are NaN or minus infinity."""
    for who, completion in samples:
        total = sum(completion.log_probs)
        if total != total or total == float("-inf"):
            raise RolloutError(
                f"{who} has log-probs that are not finite, at weight version "
                f"{completion.weight_version}: the weights overflow in {dtype}, or hold NaN. "
                "Lower the learning rate, or set actor_rollout_ref.rollout.dtype=float32."
            )


def max_model_len(cfg: Config, hf_config: PretrainedConfig) -> int:
    """Positions of prompt and response: rollout.max_model_len, or the lengths; at most the model's."""
    rollout = cfg.actor_rollout_ref.rollout
    wanted = rollout.max_model_len or rollout.prompt_length + rollout.response_length
    return min(wanted, getattr(hf_config.get_text_config(), "max_position_embeddings", None) or wanted)


MAX_CPU_CACHE_BYTES = 4 << 30
ROWS_BESIDE = 8
"""Rows that a cache has room for besides those that run at once."""
NUMBER_BYTES = 4


def cache_bytes_per_token(hf_config: PretrainedConfig) -> int:
    """Bytes of a token's keys and values in all layers, in float32, of which a CPU's cache is at most."""
    text = hf_config.get_text_config()
    if family_of(text.model_type).latent is not None:
        return text.num_hidden_layers * (text.kv_lora_rank + text.qk_rope_head_dim) * NUMBER_BYTES
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = head_size(text.to_dict())
    return 2 * text.num_hidden_layers * heads * head_dim * NUMBER_BYTES


def cached_tokens(max_num_seqs: int, row_tokens: int) -> int:
    """Tokens of a cache that holds max_num_seqs of the longest rows, and ROWS_BESIDE."""
    return (max_num_seqs + ROWS_BESIDE) * row_tokens
