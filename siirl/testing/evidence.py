"""What a run of a test leaves behind on each rank: what its nodes read and wrote, and what engines said."""

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from siirl.data.rows import objects
from siirl.guarded_files import write_whole
from siirl.testing.scripted_engine import Spoken
from siirl.testing.template_probe import TemplateSeen

Column = Tensor | list[Any]
Columns = dict[str, Column]


@dataclass
class NodeRecord:
    """One call of a node in a training step."""

    step: int
    round: int
    node: str
    agent: int
    read: Columns
    wrote: Columns
    versions: dict[str, int]
    """Training engine -> optimizer steps taken before the call."""
    again: Tensor | None = None
    """The scores of a second call on the same rows."""
    before: Tensor | None = None
    """Of a node that trains: log-probs [B, T] of the responses before it, or scores [B] of a reward model."""
    after: Tensor | None = None
    expected: Tensor | None = None
    """Of an advantage node: what the parts of each row's reward add up to, [B]; None where a penalty or a KL
    changes it."""
    metrics: dict[str, float] = field(default_factory=dict)
    swallowed: str = ""
    """Of a node that scores: what the user's function catches and gives a number for."""

    def __len__(self) -> int:
        return len(next(iter(self.read.values()), next(iter(self.wrote.values()), ())))

    def column(self, name: str) -> Any:
        """A field as it was when the node had run; KeyError if it saw none."""
        return self.wrote[name] if name in self.wrote else self.read[name]

    def has(self, *names: str) -> bool:
        """Whether it read or wrote these fields."""
        return all(name in self.read or name in self.wrote for name in names)


@dataclass
class Evidence:
    """Of one rank."""

    rank: int
    records: list[NodeRecord] = field(default_factory=list)
    spoken: list[tuple[int, Spoken]] = field(default_factory=list)
    """(step, response)."""
    digests: dict[int, dict[str, str]] = field(default_factory=dict)
    """Step -> trained model -> digest of its weights after it."""
    stops: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Rollout node -> its model's stop tokens as texts."""
    shown: dict[str, str] = field(default_factory=dict)
    """Rollout node -> its first row as text, what is trained of it between >> and <<."""
    templates: dict[str, TemplateSeen] = field(default_factory=dict)
    tools: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Node -> the tools that it may call."""
    failures: list[str] = field(default_factory=list)
    """Why episodes failed."""

    def write(self, folder: Path) -> None:
        """Write it whole, or not at all."""
        write_whole(folder / f"evidence_{self.rank}.pickle", pickle.dumps(self))

    def of(self, *nodes: str, step: int | None = None) -> Iterator[NodeRecord]:
        """The calls of nodes, in order."""
        yield from (x for x in self.records if x.node in nodes and step in (None, x.step))


def read_evidence(folder: Path) -> list[Evidence]:
    """Of all ranks of a run that have left some; the folder is the test's own."""
    files = sorted(folder.glob("evidence_*.pickle"))
    return [pickle.loads(file.read_bytes()) for file in files]


def plain_columns(rows: TensorDict) -> Columns:
    """The columns of rows on the host, apart from theirs."""
    return {
        name: rows[name].detach().cpu().clone()
        if isinstance(rows.get(name), torch.Tensor)
        else objects(rows, name)
        for name in rows.keys()
    }
