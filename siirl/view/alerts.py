"""What in a run's numbers asks for a look, in sentences: what it means and what people do about it."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from siirl.runs.run_files import MetricHistory

RECENT = 5
"""Values that an alert looks at, so that one odd step is none."""
MOST_ALIKE = 3
"""Agents of which an alert is said one by one."""
LENGTH_SUCCESS, LENGTH_FAILURE = "reward/length_success", "reward/length_failure"
LENGTH_TIMES, LEAST_LENGTH = 1.5, 64
"""Responses that score are so many times as long as the others, and no shorter than so many tokens."""
_PREFIX = re.compile(r"^(agent_\d+)/")

Points = list[tuple[int, float]]


@dataclass(frozen=True)
class Alert:
    """Something that a reader of curves would stop at."""

    metric: str
    """The curve that shows it."""
    step: int
    text: str
    """What was seen, what it means and what people do."""


@dataclass(frozen=True)
class _Rule:
    metrics: tuple[str, ...]
    seen: Callable[[Points], str]
    """What is seen in a curve, ordered by step, with its numbers; empty: nothing."""
    meaning: str


def _mean(points: Points) -> float:
    return sum(value for _, value in points) / len(points)


def _risen(least: float, times: float) -> Callable[[Points], str]:
    def seen(points: Points) -> str:
        if len(points) < 2 * RECENT:
            return ""
        early, late = _mean(points[: len(points) // 2]), _mean(points[-RECENT:])
        if late < least or late < times * early:
            return ""
        return (
            f"has risen from {early:.3g} (mean of the first half) to {late:.3g} (of the last {RECENT} steps)"
        )

    return seen


def _entropy_gone(points: Points) -> str:
    late, first = _mean(points[-RECENT:]), points[0][1]
    if len(points) < RECENT or late >= 0.02 or late >= first / 5:
        return ""
    return f"is down to {late:.2g} nat, from {first:.3g}"


def _above(bound: float) -> Callable[[Points], str]:
    def seen(points: Points) -> str:
        late = _mean(points[-RECENT:])
        return f"is {late:.3g} (mean of the last {min(RECENT, len(points))} values)" if late > bound else ""

    return seen


def _any_recent(points: Points) -> str:
    steps = [step for step, value in points[-20:] if value > 0]
    listed = ", ".join(map(str, steps[-5:]))
    return (
        f"was above 0 in {len(steps)} of the last {len(points[-20:])} values (step {listed})" if steps else ""
    )


RULES = (
    _Rule(
        ("actor/ref_kl", "reward/kl"),
        _risen(0.05, 3),
        "the policy moves away from the reference faster than before, often towards what the reward "
        "overlooks. Read recent conversations; a larger KL coefficient or a smaller learning rate holds it.",
    ),
    _Rule(
        ("actor/ppo_kl", "actor/approx_kl"),
        _risen(0.05, 3),
        "each update changes the policy more than before. People lower the learning rate, take fewer "
        "optimizer steps per batch, or clip tighter.",
    ),
    _Rule(
        ("actor/entropy",),
        _entropy_gone,
        "the policy says nearly the same each time, so there is little left to learn from. That is "
        "how a solved task ends; before that, raise the entropy bonus, the upper clip or the temperature.",
    ),
    _Rule(
        ("reward/zero_std_groups",),
        _above(0.8),
        "most prompts have samples that all score alike and teach nothing: the task is too easy or too "
        "hard. Take other prompts, more samples of each, or algorithm.filter_groups.",
    ),
    _Rule(
        ("actor/skipped_step", "critic/skipped_step"),
        _any_recent,
        "an optimizer step was skipped, because no token was trained or a gradient was not finite. If "
        "it repeats, look at the gradient norm, the learning rate and the precision.",
    ),
    _Rule(
        ("actor/rollout_log_prob_diff",),
        _above(0.05),
        "the rollout engine and the trainer disagree on the probabilities of the same tokens, so the "
        "samples are off-policy. Compare dtypes and kernels; actor.rollout_correction weighs it out.",
    ),
    _Rule(
        ("rollout/truncated",),
        _above(0.3),
        "many responses are cut at data.max_response_length, and mostly score as failures. Allow more "
        "tokens, or penalise length (reward_model.overlong_buffer).",
    ),
    _Rule(
        ("rollout/staleness", "rollout/token_staleness"),
        _risen(1.0, 1.5),
        "tokens are trained with weights that are further from those that sampled them, so the update is "
        "more off-policy. Give the rollout more ranks or a smaller rollout.max_lag; actor.rollout_correction "
        "weighs it out.",
    ),
    _Rule(
        ("reward/failed", "interaction/failed"),
        _any_recent,
        "a reward function or an environment raised or ran out of time, and its rows count as 0 or are "
        "dropped. The logs of the ranks say where.",
    ),
)


def alerts(history: MetricHistory) -> list[Alert]:
    """The alerts of a run, in the order of the rules, then metrics that were not a number.

    What many agents have is said of the first, with how many others.
    """
    found = []
    for rule in RULES:
        for metric in rule.metrics:
            same = []
            for name, values in history.series.items():
                if not name.endswith(metric) or _PREFIX.sub("", name) != metric:
                    continue
                points = sorted(values.items())
                if seen := rule.seen(points):
                    same.append(Alert(name, points[-1][0], f"{name} {seen}: {rule.meaning}"))
            found += same if len(same) <= MOST_ALIKE else [_of_many(same)]
    found += _rewarded_lengths(history)
    for name, steps in sorted(history.broken.items()):
        if steps:
            text = (
                f"{name} was not a finite number in {len(steps)} step{'s' * (len(steps) > 1)}, last in step "
                f"{max(steps)}: a division by zero or an overflow. A loss or a norm is the first to look at."
            )
            found.append(Alert(name, max(steps), text))
    return found


def _of_many(same: list[Alert]) -> Alert:
    first = same[0]
    others = ", ".join(alert.metric.partition("/")[0] for alert in same[1 : MOST_ALIKE + 1])
    more = f", and of {len(same) - 1 - MOST_ALIKE} more" if len(same) - 1 > MOST_ALIKE else ""
    return Alert(first.metric, first.step, f"{first.text} The same is seen of {others}{more}.")


def _rewarded_lengths(history: MetricHistory) -> list[Alert]:
    """Where responses are long and those that score are much longer than the others."""
    found = []
    for name, values in history.series.items():
        if _PREFIX.sub("", name) != LENGTH_SUCCESS:
            continue
        other = history.series.get(name.replace(LENGTH_SUCCESS, LENGTH_FAILURE), {})
        steps = sorted(values.keys() & other.keys())[-RECENT:]
        long, short = (sum(series[step] for step in steps) for series in (values, other))
        if len(steps) == RECENT and long / RECENT >= LEAST_LENGTH and long >= LENGTH_TIMES * short:
            text = (
                f"{name} is {long / RECENT:.0f} tokens where the other responses have {short / RECENT:.0f} "
                f"(mean of the last {RECENT} steps): length itself may be what is rewarded. Read the longest "
                "that score; a reward that does not grow with length holds it, or "
                "reward_model.overlong_buffer."
            )
            found.append(Alert(name, steps[-1], text))
    return found
