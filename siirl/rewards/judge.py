"""What a judge is asked about a response, and what its answer means. No torch."""

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from siirl.config import Config
from siirl.config.roles import judge_config
from siirl.errors import ConfigError
from siirl.http_service import Endpoint, EndpointSettings
from siirl.model_files.directory import model_positions
from siirl.user_code.load_object import is_there, load_object, read_text

PROMPT = """Grade the answer of an assistant from 0 to 10: 10 is right and helpful, 0 is wrong or useless.

[Question]
{prompt}

[Answer]
{response}

[Reference]
{ground_truth}

Compare the answer with the reference, if there is one. Then write the grade on a line of its own, as in
Score: 7"""
"""What a judge is asked unless the configuration says otherwise."""
PLACES = ("prompt", "response", "ground_truth", "data_source")
PLACE = re.compile(r"\{(" + "|".join(PLACES) + r")\}")


@dataclass(frozen=True)
class Verdict:
    """What came of one question: the score, and whether it is the default because no grade could be read."""

    score: float
    malformed: bool


class Judge:
    """Writes questions and reads answers, as reward_model.judge says. ConfigError for what cannot work.

    max_question: most tokens of a question to a rollout engine.
    """

    def __init__(self, cfg: Config):
        self.settings = cfg.reward_model.judge
        self.max_question = max_question(cfg)
        self._template = read_template(self.settings.prompt)
        self._pattern = read_pattern(self.settings.pattern)
        self._parser: Callable[[str], Any] | None = None
        if self.settings.parser:
            self._parser = load_object(self.settings.parser, "reward_model.judge.parser")
        check_range(self.settings.low, self.settings.high)
        self._endpoint = _endpoint(cfg) if self.settings.url else None

    def question(self, prompt: Any, response: str, ground_truth: Any, data_source: str) -> str:
        """The template with the row filled in; what is filled in is not searched for places again."""
        values = {
            "prompt": as_text(prompt),
            "response": response,
            "ground_truth": "" if ground_truth is None else str(ground_truth),
            "data_source": data_source,
        }
        return PLACE.sub(lambda place: values[place[1]], self._template)

    def verdict(self, answer: str | None) -> Verdict:
        """The score that an answer gives; None: it was not asked. What the user's parser raises passes."""
        grade = None if answer is None else self._grade(answer)
        low, high = self.settings.low, self.settings.high
        if grade is None or not isfinite(grade) or not low <= grade <= high:
            return Verdict(self.settings.default_score, malformed=True)
        return Verdict((grade - low) / (high - low), malformed=False)

    def ask_service(self, questions: Sequence[str]) -> list[str]:
        """The answers of the OpenAI-compatible service at judge.url, several at once.

        EndpointError if there is none after all tries.
        """
        assert self._endpoint is not None, "the judge is no service"
        with ThreadPoolExecutor(self._endpoint.settings.max_concurrent) as pool:
            return list(pool.map(self._ask, questions))

    def _ask(self, question: str) -> str:
        message = {
            "model": self.settings.served_model,
            "messages": [{"role": "user", "content": question}],
            "temperature": self.settings.temperature,
            "max_tokens": self.settings.max_tokens,
        }
        assert self._endpoint is not None
        answer = self._endpoint.post(message, trouble=_trouble)
        return str(answer["choices"][0]["message"]["content"] or "")

    def _grade(self, answer: str) -> float | None:
        if self._parser is not None:
            grade = self._parser(answer)
            return None if grade is None else float(grade)
        matches = self._pattern.findall(answer)
        if not matches:
            return None
        found = matches[-1] if isinstance(matches[-1], str) else matches[-1][0]
        try:
            return float(found)
        except ValueError:
            return None


def as_text(raw_prompt: Any) -> str:
    """A chat as text: a "role: content" paragraph for each message; of a single one its content."""
    if isinstance(raw_prompt, str):
        return raw_prompt
    if len(raw_prompt) == 1:
        return str(raw_prompt[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in raw_prompt)


def check_judge(cfg: Config) -> None:
    """ConfigError unless the questions can be written and the grades read. Runs no code of the user's."""
    settings = cfg.reward_model.judge
    read_template(settings.prompt)
    read_pattern(settings.pattern)
    check_range(settings.low, settings.high)
    if settings.url is not None and not settings.url.startswith(("http://", "https://")):
        raise ConfigError(
            f"reward_model.judge.url={settings.url!r}: it must be the http(s) address of a service, e.g. "
            "http://localhost:8000/v1/chat/completions."
        )


def max_question(cfg: Config) -> int:
    """Most tokens of a question: what the engine is built for, and the model has positions for."""
    positions = None
    if cfg.reward_model.judge.url is None:
        positions = model_positions(cfg.reward_model.model)
    room = judge_config(cfg).actor_rollout_ref.rollout.prompt_length
    return room if positions is None else min(room, positions - cfg.reward_model.judge.max_tokens)


def read_template(text: str | None) -> str:
    """The template, from its file if it is the name of one."""
    if text is None:
        return PROMPT
    key = "reward_model.judge.prompt"
    if "{" not in text and "\n" not in text:
        file = Path(text).expanduser()
        if not is_there(file):
            raise ConfigError(f"{key}={text}: it is neither a template nor a file. Correct the path.")
        text = read_text(file)
    if "{response}" not in text:
        raise ConfigError(
            f"{key} has no {{response}}: the judge would not see what it judges. Put it in; known are "
            f"{', '.join(f'{{{place}}}' for place in PLACES)}."
        )
    return text


def read_pattern(text: str) -> re.Pattern[str]:
    """The regular expression of grades."""
    key = f"reward_model.judge.pattern={text!r}"
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise ConfigError(f"{key} is no regular expression: {error}. Correct it.") from None
    if not pattern.groups:
        raise ConfigError(
            rf"{key} has no group: nothing says where the grade is. Put it in (), e.g. Score: (\d+)."
        )
    return pattern


def check_range(low: float, high: float) -> None:
    """ConfigError unless grades have a range."""
    if low >= high:
        raise ConfigError(
            f"reward_model.judge.low={low:g} is not below reward_model.judge.high={high:g}: no grade is "
            "between them. Correct them."
        )


def _endpoint(cfg: Config) -> Endpoint:
    """The service; the bounds on its requests are those of reward_model.remote."""
    remote = cfg.reward_model.remote
    settings = EndpointSettings(
        url=str(cfg.reward_model.judge.url),
        timeout_s=remote.timeout_s,
        max_tries=remote.max_tries,
        away_s=remote.away_s,
        max_concurrent=remote.max_concurrent,
        max_per_s=remote.max_per_s,
        token_env=remote.token_env,
    )
    return Endpoint(settings)


def _trouble(answer: Any) -> str | None:
    """Why an answer is none of a chat service, or None."""
    try:
        answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError) as error:
        return f"its answer has no choices[0].message.content ({type(error).__name__}: {error})"
    return None
