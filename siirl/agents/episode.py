"""One episode: a sample of a prompt on its way through an interaction of agents, tools, environment."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Message:
    """One utterance, in the order of speaking.

    role: as chat templates know it; an agent's turn is "assistant" from where it stands, and becomes "user"
    where another agent reads it. agent and turn: None for prompts, observations and tool responses. turn
    counts the turns of the episode, over all agents. reward: what the environment gave the speaker for it.
    to: the agent that alone reads it; None: all do. info: weight_version, finish_reason, tool_calls, ...
    """

    role: str
    content: str
    agent: int | None = None
    node: str | None = None
    turn: int | None = None
    reward: float = 0.0
    to: int | None = None
    info: dict[str, Any] = field(default_factory=dict)


@dataclass
class Episode:
    """What user functions (until, route, pre- and post-processing, tools) get; `state` is theirs to write.

    episode_id: group_id * samples + sample, the same for all agents. seed: 63 bits, a function of (run seed,
    step, group, sample). env_seed: that of its environment, by default the same, in validation whatever the
    step. task: raw_prompt, data_source, ground_truth, extra_info. messages: the prompt and
    everything said so far. turns: how many turns the agents have spoken. visits: how often each node has run.
    speaker: the agent whose turn it is. done: the environment ended it. ended: why it was over, in words;
    empty if it went to its last node. error: why it was dropped.
    """

    episode_id: int
    group_id: int
    sample: int
    seed: int
    task: dict[str, Any]
    messages: list[Message] = field(default_factory=list)
    env: Any = None
    state: dict[str, Any] = field(default_factory=dict)
    turns: int = 0
    visits: dict[str, int] = field(default_factory=dict)
    speaker: int | None = None
    done: bool = False
    ended: str = ""
    error: str | None = None
    env_seed: int | None = None

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
