"""Group actor_rollout_ref.serve: programs in the place of the rollout's own turns."""

import re
from dataclasses import dataclass
from typing import Any

from siirl.config.keys import key
from siirl.config.rollout import TOOL_FORMATS

FUNCTION = re.compile(r"[\w./-]+:[A-Za-z_]\w*")
VERIFIERS = "verifiers"
"""The command that plays rows of environments of that package."""
PLAYED = "command or listen"


@dataclass(frozen=True)
class ServeConfig:
    """A program plays the episodes, and asks siirl for the turns (docs/agents_elsewhere.md)."""

    command: str | None = key(
        None,
        "what plays one episode: a shell command, which finds the endpoint in OPENAI_BASE_URL; a function of "
        "the session, file.py:function; or verifiers, for rows of data.train_files=verifiers:ENVIRONMENT",
    )
    listen: bool = key(
        False, "wait for clients, who ask for an episode and play it, in the place of a command"
    )
    address: str = key(
        "127.0.0.1:0",
        "host:port at which clients are waited for; rank N takes port + N, and port 0 is a free one on each; "
        "0.0.0.0 lets other machines in, with the token",
        when="listen",
    )
    token_env: str | None = key(
        None,
        "environment variable whose value clients show to get an episode; null: the run makes a token",
        when="listen",
    )
    idle_s: float = key(
        120.0,
        "seconds without a request after which a client is taken to have left its episode",
        low=0,
        excluded=0,
        when="listen",
    )
    deadline_s: float = key(
        600.0,
        "seconds that a program may take in an episode besides the answers that it waits for",
        low=0,
        excluded=0,
        when=PLAYED,
    )
    sandbox: dict[str, Any] | None = key(
        None,
        "sandbox of each episode, where data.train_files is a folder of tasks: POST /exec runs a command in "
        "it, and the tests of the task reward an episode that ends without a reward; a mapping of kind, "
        "image, time_s, memory_mb, disk_mb, output_bytes, processes, network, workdir, options "
        "(docs/environment_packages.md)",
        when=PLAYED,
    )
    max_requests: int = key(64, "most requests of an episode", low=1, when=PLAYED)
    tool_format: str = key(
        "auto",
        "format in which the model writes tool calls, or file.py:function; auto: as its chat template does",
        choices=TOOL_FORMATS,
        user_code=True,
        when=PLAYED,
    )
    max_concurrent: int = key(64, "episodes that are played at once on each rank", low=1, when=PLAYED)

    @property
    def is_played(self) -> bool:
        """Whether programs play the episodes."""
        return self.listen or self.command is not None

    @property
    def is_function(self) -> bool:
        """Whether the command is a function of Python."""
        return FUNCTION.fullmatch(self.command or "") is not None
