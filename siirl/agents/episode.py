"""One episode: a sample of a prompt on its way through an interaction of agents, tools, environment."""

from dataclasses import dataclass, field
from typing import Any

from siirl.data.seen import NO_IMAGES, Seen
from siirl.dialect.parts import Said

MOST_REWARD = 1e15
"""A larger reward is refused: sums of squares of a batch of these are finite in float32."""


@dataclass
class Message:
    """One utterance, in the order of speaking."""

    role: str
    """As chat templates know it; an agent's turn is "assistant" from where it stands, and becomes "user"
    where another agent reads it."""
    content: str
    """With <image> where each of its images belongs."""
    agent: int | None = None
    """Who said it; None for prompts, observations and tool responses."""
    node: str | None = None
    turn: int | None = None
    """Its number among the turns of all agents in the episode; None where no agent spoke."""
    reward: float = 0.0
    """What the environment gave the speaker for it."""
    to: int | None = None
    """The agent that alone reads it; None: all do."""
    images: tuple[str, ...] = ()
    """In base64."""
    name: str | None = None
    """Of the tool whose answer it is."""
    call_id: str | None = None
    """Of the call that it answers."""
    said: Said | None = None
    """An agent's turn taken apart, before any post-processing: reasoning, answer, calls."""
    info: dict[str, Any] = field(default_factory=dict)
    """weight_version, finish_reason, tool_calls, ..."""


@dataclass
class Episode:
    """What user functions (until, route, pre- and post-processing, tools) get; `state` is theirs to write."""

    episode_id: int
    """group_id * samples + sample, the same for all agents; where episodes branch, times the most that one
    sample may have, plus the number of the branch."""
    group_id: int
    sample: int
    seed: int
    """63 bits, a function of (run seed, step, group, sample)."""
    task: dict[str, Any]
    """raw_prompt, data_source, ground_truth, extra_info; images, in base64, where prompts may have some."""
    prompt_seen: Seen = NO_IMAGES
    """Where these are among the tokens of the prompt."""
    messages: list[Message] = field(default_factory=list)
    """The prompt and everything said so far."""
    env: Any = None
    state: dict[str, Any] = field(default_factory=dict)
    turns: int = 0
    """The number of the next turn: how many there were, where no numbers were kept free (at_once.py)."""
    nodes: dict[int, str] = field(default_factory=dict)
    """Agent -> the first node where it speaks."""
    visits: dict[str, int] = field(default_factory=dict)
    """How often each node has run."""
    speaker: int | None = None
    """The agent whose turn it is."""
    done: bool = False
    """The environment ended it."""
    ended: str = ""
    """Why it was over, in words; empty if it went to its last node."""
    error: str | None = None
    """Why it was dropped."""
    path: tuple[tuple[int, int], ...] = ()
    """Of a branch, see branches.py."""
    env_seed: int | None = None
    """That of its environment, by default the same, in validation whatever the step."""

    def last_turn(self, agent: int | None = None) -> Message | None:
        """The last message that an agent (or this one) spoke."""
        spoken = (m for m in reversed(self.messages) if m.agent is not None and agent in (None, m.agent))
        return next(spoken, None)

    def conversation(self) -> list[dict[str, Any]]:
        """The episode as plain data: the `conversation` column of its rows."""
        return [
            {
                "role": message.role,
                "content": message.content,
                "agent": message.agent,
                "node": message.node,
                "turn": message.turn,
                "reward": message.reward,
                **({} if message.to is None else {"to": message.to}),
                **message.info,
            }
            for message in self.messages
        ]
