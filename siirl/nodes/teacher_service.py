"""A teacher behind a service of OpenAI's interface that gives the log-probs of prompts."""

import logging
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from siirl.config.common import ModelConfig
from siirl.config.teacher import TeacherEndpointConfig
from siirl.errors import DataError, EndpointError, NotSupportedError
from siirl.http_service import Endpoint, settings_of
from siirl.models.config_json import as_built

log = logging.getLogger(__name__)
TOKEN_ID = "token_id:"
"""What servers begin a token with that they name by its id."""
Said = dict[int, float]
"""Token -> its log-prob, of one position: of the token that is there, and of the likeliest."""


class TeacherService:
    """Asks a service what its model says of rows, token ids in and log-probs out: by prompt_logprobs, as vLLM
    has it; where the answer has none of these, by OpenAI's echo and logprobs. Nothing is asked before the
    first rows."""

    def __init__(
        self, endpoint: TeacherEndpointConfig, tokenizer: PreTrainedTokenizerBase, model: ModelConfig
    ) -> None:
        """tokenizer: of the rows that it will be asked about, and of `model`."""
        self._endpoint, self._served_model = Endpoint(settings_of(endpoint)), endpoint.served_model
        self._tokenizer = tokenizer
        self._num_words = max(len(tokenizer), as_built(model).get("vocab_size") or 0)
        self._echoes = self._is_compared = False

    def score(
        self, rows: Sequence[Sequence[int]], starts: Sequence[int], top_k: int
    ) -> list[tuple[Tensor, Tensor]]:
        """See RolloutEngine.score. EndpointError after all tries; DataError for another tokenizer."""
        if rows and not self._is_compared:
            self._compare_words()
        with ThreadPoolExecutor(self._endpoint.settings.max_concurrent) as pool:
            return list(pool.map(lambda row, start: self._score(row, start, top_k), rows, starts))

    def _score(self, row: Sequence[int], start: int, top_k: int) -> tuple[Tensor, Tensor]:
        said = self._ask(row, top_k, self._echoes)
        if said is None:
            said = self._ask(row, top_k, echo=True)
            self._echoes = True
        assert said is not None
        ids, log_probs = [], []
        for token, likely in zip(row[start:], said[start:], strict=True):
            top = sorted(likely, key=lambda one: -likely[one])[:top_k]
            ids.append([token, *top])
            log_probs.append([likely[one] for one in (token, *top)])
        return torch.tensor(ids), torch.tensor(log_probs)

    def _ask(self, row: Sequence[int], top_k: int, echo: bool) -> list[Said] | None:
        """What it says at each token of a row; None: the answer has no log-probs of the prompt."""
        message: dict[str, Any] = {
            "model": self._served_model,
            "prompt": list(row),
            "max_tokens": 1,
            "temperature": 1.0,
        }
        if echo:
            message |= {"echo": True, "logprobs": max(top_k, 1), "return_tokens_as_token_ids": True}
        else:
            message |= {"prompt_logprobs": top_k}
        found: list[list[Said] | None] = []

        def trouble(answer: Any) -> str | None:
            try:
                choice = answer["choices"][0]
                if not echo and choice.get("prompt_logprobs") is None:
                    found[:] = [None]
                    return None
                said = (
                    _echoed(choice["logprobs"], row, top_k) if echo else _of_prompt(choice["prompt_logprobs"])
                )
                found[:] = [said]
                return _why_wrong(said, row, top_k, self._num_words)
            except NotSupportedError:
                raise
            except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
                how = "by echo and logprobs" if echo else "by prompt_logprobs"
                return (
                    f"its answer does not say {how} how likely the tokens of the prompt are "
                    f"({type(error).__name__}: {error})"
                )

        self._endpoint.post(message, trouble)
        return found[-1]

    def _compare_words(self) -> None:
        """DataError unless the service means by each token what the rows mean, if it says so: /detokenize, as
        vLLM has it, gives the text of all tokens. A service without that is trusted, with a warning."""
        self._is_compared = True
        root, _, _ = self._endpoint.settings.url.partition("/v1/")
        settings = replace(self._endpoint.settings, url=f"{root}/detokenize", max_tries=1, away_s=0.0)
        tokens = list(range(len(self._tokenizer)))
        try:
            text = Endpoint(settings).post({"tokens": tokens})["prompt"]
        except (EndpointError, KeyError, TypeError) as error:
            log.warning(
                "the teacher at %s does not say which tokenizer it has, so nobody compares it (%s)",
                self._endpoint.settings.url,
                error,
            )
            return
        if text != self._tokenizer.decode(tokens):
            raise DataError(
                f"teacher.endpoint.url={self._endpoint.settings.url}: the service has another tokenizer: it "
                f"reads the {len(tokens)} tokens of {self._tokenizer.name_or_path} as another text. A "
                "teacher says how likely these tokens are, so it needs the same ones. Serve a model of its "
                "family."
            )


def _of_prompt(positions: list[Any]) -> list[Said]:
    """What vLLM says in prompt_logprobs: nothing of the first token."""
    return [{int(token): float(said["logprob"]) for token, said in (at or {}).items()} for at in positions]


def _echoed(logprobs: Any, row: Sequence[int], top_k: int) -> list[Said]:
    """What OpenAI's echo says; which tokens are likeliest is known only where it names them by their ids."""
    own = logprobs["token_logprobs"][: len(row)]
    if len(own) < len(row):
        raise ValueError(f"it echoes {len(own)} of {len(row)} tokens")
    said = [{} if one is None else {token: float(one)} for token, one in zip(row, own, strict=True)]
    for at, likely in enumerate(logprobs["top_logprobs"][: len(row)] if top_k else ()):
        if not all(name.startswith(TOKEN_ID) for name in likely or {}):
            raise NotSupportedError(
                "not supported yet: teacher.endpoint.url of a service that names tokens by their texts, of "
                "which several may be equal, with actor.distill.top_k above 0. Set actor.distill.top_k=0, or "
                "serve the teacher by vLLM."
            )
        said[at] |= {int(name.removeprefix(TOKEN_ID)): float(one) for name, one in (likely or {}).items()}
    return said


def _why_wrong(said: list[Said], row: Sequence[int], top_k: int, num_words: int) -> str | None:
    """Why that is no answer about these tokens, or None."""
    if len(said) != len(row):
        return f"it was asked about {len(row)} tokens, and speaks of {len(said)}: it adds some, or cuts rows"
    for at in range(1, len(row)):
        if row[at] not in said[at] or len(said[at]) < top_k:
            return (
                f"at place {at} of the row it gives the log-probs of {len(said[at])} tokens, and was asked "
                f"for that of the token {row[at]} and of the {top_k} likeliest"
            )
        if not all(math.isfinite(one) and token < num_words for token, one in said[at].items()):
            return f"at place {at} of the row it names one beyond the {num_words} tokens, or no number"
    return None
