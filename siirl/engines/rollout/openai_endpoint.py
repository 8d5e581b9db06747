"""External agents: an OpenAI-compatible chat service speaks their turns. No weights, no log-probs."""

import queue
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from siirl.compiler.plan import ModelPlan
from siirl.config import Config
from siirl.data.completions import Completion, Key, Request
from siirl.deadline import Deadline
from siirl.engines.rollout.base import Interrupt, RolloutEngine, RolloutStream, check_keys
from siirl.errors import EndpointError, EpisodeFailed, NotSupportedError, RolloutError
from siirl.http_service import Endpoint, settings_of
from siirl.parallel.process_groups import ProcessGroupManager

BEGIN, MIDDLE, END = "\ue000", "\ue001", "\ue002"
"""Private-use characters around a message: BEGIN role MIDDLE content END."""
MARKS = {ord(mark): None for mark in (BEGIN, MIDDLE, END)}
MAX_SEED = 1 << 31


class Messages:
    """A vocabulary in which a conversation can be read back from its tokens: each character is one."""

    eos_token_id: int | None = ord(END)
    chat_template = "messages"

    def apply_chat_template(self, conversation: Any, **options: Any) -> str:
        """The messages as text, and where the next one begins."""
        if options.get("tools"):
            raise NotSupportedError(
                "not supported yet: tools of an external agent (rollout.name=openai). Unset "
                "rollout.multi_turn.enable of its node."
            )
        said = [
            f"{BEGIN}{message['role']}{MIDDLE}{str(message['content']).translate(MARKS)}{END}"
            for message in conversation
        ]
        return "".join([*said, f"{BEGIN}assistant{MIDDLE}"])

    def encode(self, text: str, **options: Any) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: Any, **options: Any) -> str:
        text = "".join(map(chr, token_ids))
        return text.translate(MARKS) if options.get("skip_special_tokens") else text

    def messages(self, token_ids: Sequence[int]) -> list[dict[str, str]]:
        """The messages of a conversation whose next turn begins at its end."""
        *complete, last = self.decode(token_ids).split(BEGIN)[1:]
        assert last.endswith(MIDDLE), "a turn does not begin here"
        parts = (message.removesuffix(END).split(MIDDLE) for message in complete)
        return [{"role": role, "content": content} for role, content in parts]


class OpenAIRollout(RolloutEngine):
    """Asks rollout.agent.endpoint for each turn. Its tokens are the characters of Messages."""

    def __init__(
        self, plan: ModelPlan, cfg: Config, groups: ProcessGroupManager | None, device: torch.device | str
    ) -> None:
        """No communication, and nothing is asked yet."""
        self.name = plan.name
        self.weight_version = 0
        self.vocabulary = Messages()
        service = cfg.actor_rollout_ref.rollout.agent.endpoint
        assert service.url is not None
        self._served_model = service.served_model
        self._endpoint = Endpoint(settings_of(service))
        self._pool = ThreadPoolExecutor(service.max_concurrent, thread_name_prefix=f"endpoint of {plan.name}")

    def new_stream(self, interrupt: Interrupt | None) -> RolloutStream:
        """See RolloutEngine: up to endpoint.max_concurrent requests at once."""
        return EndpointStream(self)

    def weight_specs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """None: the service has its own."""
        return {}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """RolloutError: nobody gives weights to a service."""
        raise RolloutError(f"rollout engine {self.name!r} is a service: it takes no weights.")

    def answer(self, request: Request) -> Completion:
        """What the service says to a request; from any thread. EpisodeFailed after all tries."""
        params = request.params
        message = {
            "model": self._served_model,
            "messages": self.vocabulary.messages(request.prompt),
            "temperature": params.temperature,
            "top_p": params.top_p,
            "max_tokens": params.max_tokens,
            "seed": request.seed % MAX_SEED,
        }
        try:
            choice = self._endpoint.post(message, trouble=_trouble)["choices"][0]
        except EndpointError as error:
            raise EpisodeFailed(str(error), kind="endpoint") from error
        tokens = self.vocabulary.encode((choice["message"]["content"] or "").translate(MARKS) + END)
        reason = "length" if choice.get("finish_reason") == "length" else "stop"
        return Completion(tokens, [0.0] * len(tokens), reason, self.weight_version)

    def later(self, request: Request, answers: "queue.SimpleQueue[Answer]") -> None:
        """Ask without waiting; the answer goes into the queue."""
        self._pool.submit(lambda: answers.put((request.key, self._attempt(request))))

    def close(self) -> None:
        """Give up what has not been asked yet."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _attempt(self, request: Request) -> Completion | BaseException:
        try:
            return self.answer(request)
        except BaseException as error:  # noqa: BLE001 - the edge of the thread: raised again by collect
            return error


Answer = tuple[Key, Completion | BaseException]


class EndpointStream(RolloutStream):
    """Requests to a service; an answer comes when the service gives it."""

    def __init__(self, engine: OpenAIRollout) -> None:
        super().__init__()
        self._engine = engine
        self._pending: set[Key] = set()
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def submit(self, requests: Sequence[Request]) -> None:
        """See RolloutStream."""
        check_keys(requests, self._pending)
        for request in requests:
            self._pending.add(request.key)
            self._engine.later(request, self._answers)

    def collect(self, timeout_s: float) -> list[tuple[Key, Completion | EpisodeFailed]]:
        """See RolloutStream. An answer that cannot be had is an EpisodeFailed in its place."""
        found: list[tuple[Key, Completion | EpisodeFailed]] = []
        wait = Deadline(timeout_s)
        while self._pending:
            try:
                key, said = self._answers.get(timeout=0 if found else wait.left_s)
            except queue.Empty:
                break
            self._pending.discard(key)
            if isinstance(said, BaseException) and not isinstance(said, EpisodeFailed):
                raise said
            found.append((key, said))
        return found

    def close(self) -> None:
        """See RolloutStream; late answers are dropped with their queue."""
        self._pending = set()


def _trouble(answer: Any) -> str | None:
    """Why an answer is none of a chat service, or None."""
    try:
        content = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        return f"{answer!r:.200} is no answer of a chat/completions service"
    return None if content is None or isinstance(content, str) else f"its content is {content!r:.200}"
