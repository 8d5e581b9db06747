"""OpenAI's completions on the wire: texts, or tokens, that the policy goes on from. Pure.

Source of the format: the API reference of OpenAI, "Completions", and vLLM's, which takes and tells token ids.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from siirl.agents.outside.chat_wire import choice_of, event, head, with_usage
from siirl.agents.outside.content import BadRequest
from siirl.agents.outside.exchange import MOST_CHOICES, Asked, Said, Told, usage
from siirl.agents.outside.parameters import (
    SAMPLED_ALONE,
    TEMPLATE,
    flag,
    given,
    names,
    shown,
    stop_strings,
    whole_number,
)

ACTS = names("model prompt max_tokens stream stop n logprobs return_token_ids")
REFUSED = {"add_special_tokens": (True, TEMPLATE), "suffix": ("", "an answer follows its prompt")}
MOST_ID = 1 << 31


def asked_of(body: Any) -> Asked:
    """The request that a JSON body is. BadRequest if it is none, or asks for what siirl does not do."""
    if not isinstance(body, dict) or not isinstance(body.get("model"), str):
        raise BadRequest("a request is a JSON object with model and prompt")
    unused = given(body, ACTS, REFUSED)
    number = body.get("logprobs")
    if number is not None and (isinstance(number, bool) or number != 0):
        raise BadRequest(f"logprobs = {shown(number)}: {SAMPLED_ALONE}. Ask for 0", "unsupported_parameter")
    prompts, choices = _prompts(body.get("prompt")), whole_number(body, "n", MOST_CHOICES) or 1
    if len(prompts) * choices > MOST_CHOICES:
        raise BadRequest(
            f"{len(prompts)} prompts with n = {choices}: at most {MOST_CHOICES} answers are given at once"
        )
    return Asked(
        body["model"],
        [],
        (),
        whole_number(body, "max_tokens"),
        flag(body, "stream"),
        with_usage(body),
        unused,
        stop_strings(body, "stop"),
        choices,
        number is not None,
        flag(body, "return_token_ids"),
        prompts,
    )


def completion(answer: Sequence[Said], created: int) -> dict[str, Any]:
    """The answer in one piece."""
    choices = [_choice(said, index) for index, said in enumerate(answer)]
    return head(answer, created, "text_completion", "cmpl") | {"choices": choices, "usage": usage(answer)}


class Stream:
    """The answer as server-sent events (an AnswerStream): texts as they come."""

    def __init__(self, created: int, with_usage: bool) -> None:
        self._created, self._with_usage = created, with_usage
        self._head: dict[str, Any] | None = None
        self._told: defaultdict[int, Told] = defaultdict(Told)

    def more(self, index: int, said: Said) -> Iterator[bytes]:
        """See AnswerStream."""
        begun = self._begun(said)
        _, text = self._told[index].more(said)
        if text:
            yield event(begun | {"choices": [choice_of(said.without_tokens(), index, {"text": text}, False)]})

    def end(self, answer: Sequence[Said]) -> Iterator[bytes]:
        """See AnswerStream. What is known of tokens comes with the last text."""
        for index, said in enumerate(answer):
            _, text = self._told[index].more(said)
            yield event(self._begun(said) | {"choices": [_choice(said, index) | {"text": text}]})
        if self._with_usage:
            yield event(self._begun(answer[0]) | {"choices": [], "usage": usage(answer)})
        yield b"data: [DONE]\n\n"

    def _begun(self, said: Said) -> dict[str, Any]:
        self._head = self._head or head([said], self._created, "text_completion", "cmpl")
        return self._head


def _choice(said: Said, index: int) -> dict[str, Any]:
    choice = choice_of(said, index, {"text": said.message["content"]})
    if said.with_log_probs:
        texts = [token.text for token in said.tokens]
        choice["logprobs"] = {
            "tokens": texts,
            "token_logprobs": [token.log_prob for token in said.tokens],
            "top_logprobs": None,
            "text_offset": [0, *accumulate(map(len, texts))][: len(texts)],
        }
    return choice | ({"prompt_token_ids": list(said.read_ids)} if said.read_ids else {})


def _prompts(given: Any) -> tuple[str | tuple[int, ...], ...]:
    """A text, tokens, or a list of one or the other. BadRequest."""
    one = [given] if isinstance(given, str) or _are_tokens(given) else given
    if not isinstance(one, list) or not one:
        raise BadRequest(f"prompt = {shown(given)} is neither a text, nor tokens, nor a list of these")
    for prompt in one:
        if not (isinstance(prompt, str) and prompt) and not _are_tokens(prompt):
            raise BadRequest(f"prompt has {shown(prompt)}, which is neither a text nor tokens")
    return tuple(prompt if isinstance(prompt, str) else tuple(prompt) for prompt in one)


def _are_tokens(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(id, int) and not isinstance(id, bool) and 0 <= id < MOST_ID for id in value)
    )
