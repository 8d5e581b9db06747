"""The instructions of a plan, which each worker runs in order, on the ranks that are named. Data only."""

from dataclasses import dataclass

from siirl.parallel.placement import Ranks
from siirl.types import FieldKey


@dataclass(frozen=True)
class Load:
    """Take the next batch of prompts into the store."""

    loader: str
    keys: tuple[FieldKey, ...]
    layout: str
    ranks: Ranks


@dataclass(frozen=True)
class Reshard:
    """Copy fields from one layout to another."""

    keys: tuple[FieldKey, ...]
    route: str
    ranks: Ranks


@dataclass(frozen=True)
class Run:
    """Run a node's op: rows of `reads` in layout `source` in, rows of `writes` in layout `target` out."""

    node: str
    reads: tuple[FieldKey, ...]
    writes: tuple[FieldKey, ...]
    source: str
    target: str
    ranks: Ranks
    joins: tuple[tuple[FieldKey, str], ...] = ()
    """What it reads of other agents in its interaction, where their rows lie (layout ids): each rank has the
    rows of the same episodes in all of them, in whatever number."""


@dataclass(frozen=True)
class Serve:
    """Answer the turns that the Run of `node`, an interaction's entry, asks of the engines on these ranks.

    It lasts until all who play that interaction are done. The ranks have no part in that Run.
    """

    node: str
    ranks: Ranks


@dataclass(frozen=True)
class SyncWeights:
    """Bring a rollout engine to its trainer's weights; does nothing when the versions already agree. Bring a
    policy's weights to a teacher; does nothing in steps in which it takes none."""

    link: str
    ranks: Ranks


@dataclass(frozen=True)
class Free:
    """Drop columns (field, layout id) that nobody reads any more."""

    keys: tuple[tuple[FieldKey, str], ...]
    ranks: Ranks


@dataclass(frozen=True)
class Repeat:
    """Run the instructions up to the Until of the same node, as often as the node needs rows.

    All of `ranks` agree before each round whether there is another; none may be needed at all. What a round
    makes is freed within it: rows leave it through the node's Collect alone.
    """

    node: str
    ranks: Ranks


@dataclass(frozen=True)
class Collect:
    """Give a node rows of `reads` in layout `source`, which it keeps, all or some, until its Run."""

    node: str
    reads: tuple[FieldKey, ...]
    source: str
    ranks: Ranks


@dataclass(frozen=True)
class Until:
    """The end of a Repeat, on the same ranks."""

    node: str
    ranks: Ranks


Instruction = Load | Reshard | Run | Serve | SyncWeights | Free | Repeat | Collect | Until
