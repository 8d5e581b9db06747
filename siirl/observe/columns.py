"""The columns of the per-step table: which metric fills each, and how it is printed. Pure Python."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_AGENT = re.compile(r"^agent_(\d+)/")


@dataclass(frozen=True)
class Column:
    """A column of the table."""

    header: str
    names: tuple[str, ...]
    """Metrics that can fill it, best first; each also matches after a prefix ("agent_1/" + name)."""
    digits: int | None = 3
    """After the decimal point; None: three significant ones."""
    always: bool = False


ENGINE_RESTARTS = "rollout/engine_restarts"
"""Metric: rollout engines that were started again in a step, all ranks together; not a column."""
REWARD = Column("reward", ("reward/total", "reward/score"), always=True)
"""All that advantages are computed from; the score of what only samples."""
VALIDATION_REWARD = Column("val", ("val/reward/mean",), always=True)
PARTS = ("own", "team", "env", "shaping")
"""What a reward is the sum of, where it has several parts: reward/NAME."""
PART = "reward/part/"
"""Beginning of a metric, in validation after val/: what a function, or the reward of a node, gives, where a
score is the weighted sum of several.
"""
_PART = re.compile(rf"(val/)?{PART}(.+)")


def part_metric(name: str, validate: bool) -> str:
    """Metric: the mean of a reward function whose score is added to others, before its weight."""
    return f"{'val/' * validate}{PART}{name}"


def rows_metric(node: str) -> str:
    """Metric: rows that a node took in a step, all ranks together."""
    return f"rows/{node}"


def moved_metric(route: str) -> str:
    """Metric: bytes that ranks sent each other along a route of the plan in a step."""
    return f"reshard/{route.replace(' -> ', '_to_').replace('/', '_')}_bytes"


COLUMNS = (
    REWARD,
    VALIDATION_REWARD,
    *(Column(name, (f"reward/{name}",)) for name in PARTS),
    Column("length", ("rollout/response_length",), digits=1, always=True),
    Column("ref kl", ("actor/ref_kl", "reward/kl")),
    Column("ppo kl", ("actor/ppo_kl",)),
    Column("entropy", ("actor/entropy",)),
    Column("clip", ("actor/clip_fraction",)),
    Column("mismatch", ("actor/rollout_log_prob_diff",), digits=4),
    Column("grad", ("actor/grad_norm",)),
    Column("lr", ("actor/lr",), digits=None),
    Column("tok/s", ("perf/tokens_per_s",), digits=0),
    Column("tok/s/dev", ("perf/tokens_per_s_per_device",), digits=0),
    Column("mfu", ("perf/mfu",)),
    Column("step s", ("time/step_s",), digits=2, always=True),
)


def columns_of(values: Iterable[str]) -> tuple[Column, ...]:
    """The columns for metrics of these names: the fixed ones, and behind the rewards one for each part."""
    names = dict.fromkeys(_AGENT.sub("", name) for name in values)
    parts = sorted(filter(None, map(_PART.fullmatch, names)), key=lambda part: part[1] or "")
    behind = 1 + COLUMNS.index(VALIDATION_REWARD)
    return (*COLUMNS[:behind], *map(_part_column, parts), *COLUMNS[behind:])


def _part_column(part: re.Match[str]) -> Column:
    name = part[2]
    header = f"part {name}" if any(name == column.header for column in COLUMNS) else name
    return Column(f"val {header}" if part[1] else header, (part[0],))


def matches(column: Column, values: Mapping[str, float]) -> dict[str, float]:
    """The metrics that fill the column: its first name that occurs, alone or under agents (in order)."""
    for name in column.names:
        found = {key: value for key, value in values.items() if _AGENT.sub("", key) == name}
        if found:
            return dict(sorted(found.items(), key=lambda item: _agent(item[0])))
    return {}


def agents_of(column: Column, values: Mapping[str, float]) -> tuple[int, ...]:
    """The agents whose metrics fill the column; none if it is filled by one of no agent."""
    return tuple(agent for name in matches(column, values) if (agent := _agent(name)) >= 0)


def cell(column: Column, values: Mapping[str, float], agents: Sequence[int] = ()) -> str:
    """The text of a cell: the values of several agents joined by a bar; a dash where the step has none.

    agents: all that there are; those of which this step has no value have a dash among the others.
    """
    found = {_agent(name): number(value, column.digits) for name, value in matches(column, values).items()}
    if found and -1 not in found:
        found = {agent: found.get(agent, "-") for agent in sorted({*found, *agents})}
    return "|".join(found.values()) or "-"


def _agent(name: str) -> int:
    found = _AGENT.match(name)
    return int(found[1]) if found else -1


def number(value: float, digits: int | None) -> str:
    """A number in few characters: fixed point, or exponent form where that would show no digit of it."""
    if not math.isfinite(value):
        return str(value)
    if digits is None:
        return f"{value:.3g}"
    if value and digits and (abs(value) < 0.5 * 10**-digits or abs(value) >= 1e6):
        return f"{value:.1e}"
    return f"{value:.{digits}f}"
