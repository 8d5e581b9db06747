"""Group actor_rollout_ref.serve: a program in the place of the rollout's own turns."""

import re
from dataclasses import dataclass

from siirl.config.keys import key

FUNCTION = re.compile(r"[\w./-]+:[A-Za-z_]\w*")
VERIFIERS = "verifiers"
"""The command that plays rows of environments of that package."""


@dataclass(frozen=True)
class ServeConfig:
    """A program plays the episodes, and asks siirl for the turns (docs/agents_elsewhere.md)."""

    command: str | None = key(
        None,
        "what plays one episode: a shell command, which finds the endpoint in OPENAI_BASE_URL; a function of "
        "the session, file.py:function; or verifiers, for rows of data.train_files=verifiers:ENVIRONMENT",
    )
    deadline_s: float = key(
        600.0,
        "seconds that the command may take in an episode besides the answers that it waits for",
        low=0,
        excluded=0,
        when="command",
    )
    max_requests: int = key(64, "most requests of an episode", low=1, when="command")
    tool_format: str = key(
        "hermes",
        "format in which the model writes tool calls, or file.py:function",
        choices=("hermes", "json", "llama3_json", "qwen3_coder"),
        user_code=True,
        when="command",
    )
    max_concurrent: int = key(64, "episodes that are played at once on each rank", low=1, when="command")

    @property
    def is_function(self) -> bool:
        """Whether the command is a function of Python."""
        return FUNCTION.fullmatch(self.command or "") is not None
