"""The rollout engine of a test: transformers' engine, whose responses may be those of a script.

What is said is the script's; its log-probs, versions and stop tokens are those of the model,
so that all behind the engine is as in any run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from siirl.data.completions import Completion, Request
from siirl.engines.rollout.base import Interrupt
from siirl.engines.rollout.hf.hf_rollout import HFRollout

MOST_SAMPLED = 12
"""Tokens that a tiny model says by itself, before it stops."""

Script = Callable[[str, Request], list[int] | None]
"""(engine, request) -> the tokens of the response without a stop token; None: what the model samples."""


@dataclass(frozen=True)
class Spoken:
    """A response as an engine gave it."""

    engine: str
    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: str
    version: int
    scripted: bool
    num_script: int
    """Tokens of the script, without an end that it did not have; more than token_ids where it was cut."""


class ScriptedRollout(HFRollout):
    """Built as HFRollout; `script` is set before the first request."""

    script: Script
    spoken: list[Spoken]

    def _sample(self, requests: Sequence[Request], interrupt: Interrupt | None) -> list[Completion]:
        """See SampleWave. Nothing is interrupted: what is said is said at once."""
        self.wake()
        found: list[Completion | None] = [None] * len(requests)
        lengths = [0] * len(requests)
        sampled = []
        for place, request in enumerate(requests):
            text = None if request.start or request.seen.images else self.script(self.name, request)
            if text is None:
                sampled.append(place)
                continue
            tokens = self._ended(text, request)
            lengths[place] = min(len(text), len(tokens))
            found[place] = self._said(request, tokens[: request.params.max_tokens], len(tokens))
        asked = [self._shorter(requests[place]) for place in sampled]
        for place, completion in zip(sampled, super()._sample(asked, None) if asked else (), strict=True):
            found[place] = self._stopped(requests[place], completion)
        done = [one for one in found if one is not None]
        self.spoken += [
            Spoken(
                self.name,
                tuple(request.prompt),
                tuple(one.token_ids),
                one.finish_reason,
                one.weight_version,
                bool(length),
                length,
            )
            for request, one, length in zip(requests, done, lengths, strict=True)
        ]
        return done

    def _ended(self, text: list[int], request: Request) -> list[int]:
        """The tokens of a response up to its first stop token, which is added where there is none."""
        stops = () if request.params.ignore_eos else request.params.stop_token_ids
        for place, token in enumerate(text):
            if token in stops:
                return text[: place + 1]
        return [*text, *stops[:1]]

    def _shorter(self, request: Request) -> Request:
        return replace(
            request, params=replace(request.params, max_tokens=min(request.params.max_tokens, MOST_SAMPLED))
        )

    def _stopped(self, request: Request, sampled: Completion) -> Completion:
        """What the model said, with an end if it was to be longer: it does not know when to stop."""
        stops, most = request.params.stop_token_ids, request.params.max_tokens
        if sampled.finish_reason != "length" or len(sampled.token_ids) >= most or not stops:
            return sampled
        if request.params.ignore_eos or request.seen.images:
            return sampled
        tokens = [*sampled.token_ids, stops[0]]
        return self._said(request, tokens, len(tokens))

    def _said(self, request: Request, tokens: list[int], whole: int) -> Completion:
        """A response of these tokens, with the model's log-probs of them."""
        log_probs = self._log_probs(list(request.prompt), tokens, request.params.temperature)
        reason = "stop" if len(tokens) == whole and not request.params.ignore_eos else "length"
        if not request.params.stop_token_ids:
            reason = "length"
        return Completion(tokens, log_probs, reason, self.weight_version)

    def _log_probs(self, prompt: list[int], tokens: list[int], temperature: float) -> list[float]:
        with torch.inference_mode():
            ids_S = torch.tensor([prompt + tokens], device=self._model.device)
            logits_TV = self._model(input_ids=ids_S, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
            log_prob_TV = torch.log_softmax(logits_TV / (temperature or 1.0), -1)
            return log_prob_TV.gather(-1, ids_S[0, len(prompt) :, None])[:, 0].tolist()
