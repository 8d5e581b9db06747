"""Where the time of a step will go, in words: `siirl plan --explain`."""

from siirl.compiler.cost.step_time import Phase, StepTime
from siirl.parallel.placement import format_ranks
from siirl.show.text_table import table

_SMALL = 0.03  # of a phase: parts below are left out
_IDLE = 0.02  # of a step: waiting below is left out


def explanation(found: StepTime, device: str, world_size: int) -> str:
    """The phases of a predicted step, what bounds it, what is not counted, and what was assumed."""
    rows = [["phase", "ranks", "begins", "seconds", "share", "where it goes, s"]]
    for phase in found.phases:
        share = f"{100 * phase.seconds / found.step_s:.0f}%" if found.step_s else ""
        begins = f"{phase.begins_s:.1f}"
        rows.append(
            [phase.name, format_ranks(phase.ranks), begins, _seconds(phase.seconds), share, _parts(phase)]
        )
    lines = table(rows) if found.phases else []
    if found.step_s:
        rate = f"{found.tokens / found.step_s / world_size:,.0f} tokens/s on each of {world_size} devices"
        lines.append(f"step: {_seconds(found.step_s)} s; {rate}")
    lines += [f"wait: {line}" for line in _waiting(found, world_size)]
    lines += [f"not counted: {line}" for line in found.not_counted]
    lines += [f"assumed: {line}" for line in found.assumed]
    return "\n".join([f"time of a step, predicted for {device}", *(f"  {line}" for line in lines)])


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value >= 1 else f"{value:.2f}" if value >= 0.01 else f"{value:.2g}"


def _parts(phase: Phase) -> str:
    shown = [f"{what} {_seconds(s)}" for what, s in phase.parts.items() if s >= _SMALL * phase.seconds]
    return ", ".join(shown)


def _waiting(found: StepTime, world_size: int) -> list[str]:
    """Ranks that have nothing to do for a part of the step."""
    idle: dict[float, list[int]] = {}
    for rank in range(world_size):
        busy = sum(phase.seconds for phase in found.phases if rank in phase.ranks)
        waits = round(found.step_s - busy, 1)
        if waits > _IDLE * found.step_s:
            idle.setdefault(waits, []).append(rank)
    return [f"ranks {format_ranks(ranks)} have nothing to do for {waits} s" for waits, ranks in idle.items()]
