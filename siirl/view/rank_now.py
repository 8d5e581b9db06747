"""What ranks do now, or did last: they run an instruction, or wait in it for ranks that are behind.

All ranks go through the same places in one order, each through those in which it has a part. An instruction
that begins when its last rank has come keeps those that came before it waiting.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from siirl.compiler.plan import Instruction, Plan, Run
from siirl.parallel.placement import Ranks
from siirl.runs.run_state import RankState
from siirl.view.critical_path import meeting_names

TOGETHER = ("report", "checkpoint")
"""Parts of a step that are no instructions and of all ranks."""


@dataclass(frozen=True)
class Doing:
    """What a rank does."""

    state: Literal["runs", "waits", "failed"]
    node: str = ""
    """The node that it is at: that which it runs, or which comes next where rows and weights move."""
    behind: Ranks = ()
    """Whom it waits for."""


def doing(plan: Plan | None, ranks: Sequence[RankState]) -> dict[int, Doing]:
    """Rank -> what it does. Without a plan, or of runs that did not record it, nobody is known to wait."""
    meeting = meeting_names(plan)
    places: dict[tuple[int, str, tuple[int, ...], str], list[int]] = {}
    for rank in ranks:
        places.setdefault((rank.step, rank.part, rank.order, rank.node), []).append(rank.rank)
    where = {rank.rank: (rank.step, *rank.order) for rank in ranks if rank.order}
    found: dict[int, Doing] = {}
    for (step, part, order, name), here in places.items():
        ins = _instruction(plan, part, order)
        if ins is None:
            members = tuple(where) if name in TOGETHER and order else ()
        else:
            members = ins.ranks if name in meeting else ()
        behind = tuple(rank for rank in members if where.get(rank, (step, *order)) < (step, *order))
        for rank in here:
            node = name if plan is None or ins is None else _node(plan, part, order[-1], rank, name)
            found[rank] = Doing("waits" if behind else "runs", node, behind)
    for rank in ranks:
        if rank.error:
            found[rank.rank] = Doing("failed", found[rank.rank].node)
    return found


def _section(plan: Plan, part: str) -> Sequence[Instruction]:
    return {"step": plan.instructions, "validation": plan.validation}.get(part, ())


def _instruction(plan: Plan | None, part: str, order: tuple[int, ...]) -> Instruction | None:
    """The one that a rank is in; None outside of the plan. order: part, then number, round, number."""
    section = () if plan is None else _section(plan, part)
    return section[order[-1]] if len(order) > 1 and order[-1] < len(section) else None


def _node(plan: Plan, part: str, number: int, rank: int, name: str) -> str:
    """The node of an instruction, or the next one that the rank runs."""
    if name in plan.nodes:
        return name
    after = _section(plan, part)[number:]
    return next((ins.node for ins in after if isinstance(ins, Run) and rank in ins.ranks), "")
