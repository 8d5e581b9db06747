"""What ranks do now, or did last: they run an instruction, wait in it for ranks that are behind, or are idle.

All ranks go through the same places in one order, each through those in which it has a part. An instruction
that begins when its last rank has come keeps those that came before it waiting.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from siirl.compiler.plan import Plan
from siirl.compiler.plan_instructions import Instruction, Run, Serve
from siirl.observe.position import AT_END
from siirl.parallel.placement import Ranks, format_ranks
from siirl.runs.run_state import RankState
from siirl.show.plan_text import home_ranks

MEET = ("reshard", "weight_sync", "rounds")
TOGETHER = ("report", "checkpoint")
"""Parts of a step that are no instructions and of all ranks."""


@dataclass(frozen=True)
class Doing:
    """What a rank does."""

    state: Literal["runs", "waits", "idle", "failed"]
    """idle: it has done its part, or has none, and others have not."""
    node: str = ""
    """The node that it is at: that which it runs, or which comes next where rows and weights move."""
    behind: Ranks = ()
    """Whom it waits for."""

    def text(self) -> str:
        """What it does, in words: waits for 2-3; "" where it runs, as where it is says that."""
        until = f"until {format_ranks(self.behind)} {'are' if len(self.behind) > 1 else 'is'} done"
        match self.state:
            case "waits":
                return f"waits for {format_ranks(self.behind)}"
            case "idle":
                return f"idle {until}" if self.behind else "idle"
            case "failed":
                return "failed"
        return ""


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
        ended = part == AT_END
        if ins is None:
            members = tuple(where) if order and (ended or name in TOGETHER) else ()
        else:
            members = ins.ranks if name in meeting else ()
        behind = tuple(rank for rank in members if where.get(rank, (step, *order)) < (step, *order))
        for rank in here:
            node = name if plan is None or ins is None else _node(plan, part, order[-1], rank, name)
            found[rank] = Doing("waits" if behind else "runs", node, behind)
            if ended:
                found[rank] = Doing("idle", "", behind)
    for rank in ranks:
        if rank.error:
            found[rank.rank] = Doing("failed", found[rank.rank].node)
    return found


def meeting_names(plan: Plan | None) -> frozenset[str]:
    """Names of the instructions that begin when their last rank has come."""
    nodes = () if plan is None else plan.nodes.items()
    models = {} if plan is None else plan.models
    split = (
        name
        for name, node in nodes
        if node.model in models and models[node.model].role != "rollout" and len(models[node.model].ranks) > 1
    )
    return frozenset((*MEET, *split))


def _section(plan: Plan, part: str) -> Sequence[Instruction]:
    return {"step": plan.instructions, "validation": plan.validation}.get(part, ())


def _instruction(plan: Plan | None, part: str, order: tuple[int, ...]) -> Instruction | None:
    """The one that a rank is in; None outside of the plan. order: part, then number, round, number."""
    section = () if plan is None else _section(plan, part)
    return section[order[-1]] if len(order) > 1 and order[-1] < len(section) else None


def _node(plan: Plan, part: str, number: int, rank: int, name: str) -> str:
    """The node of an instruction, the one whose turns it answers, or the next one that the rank runs."""
    if name in plan.nodes:
        return name
    after = _section(plan, part)[number:]
    if isinstance(after[0], Serve):
        homes, stages = home_ranks(plan), plan.interactions[after[0].node].stages
        return next((stage.node for stage in stages if rank in homes[stage.node]), after[0].node)
    return next((ins.node for ins in after if isinstance(ins, Run) and rank in ins.ranks), "")
