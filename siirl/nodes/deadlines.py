"""Which groups leave a delay line in a step, and when a step may end. Pure.

The bound (rollout.max_lag, L): a row that trains in step k has no token sampled before step k - L. It is
held by waiting: the groups that were begun first leave first, and a step ends only when those that stay can
leave in time, as many in each step as are sure to leave (the earliest deadline goes first). As what stays is
the surplus, at most L times as many, that is always so once all are complete. The same is asked of each round
of a step that has several: what a later one gives is not counted on.
"""

from collections.abc import Mapping

Oldest = Mapping[int, int]
"""Group -> the step of its oldest token; that of now if it has none yet."""


def leaving(num_open: Mapping[int, int], oldest: Oldest, batch: int) -> list[int]:
    """Of the groups that are complete, the `batch` that were begun first, ascending.

    num_open: group -> how much of it is not complete.
    """
    complete = [group for group, left in num_open.items() if not left]
    return sorted(sorted(complete, key=lambda group: (oldest[group], group))[:batch])


def is_enough(
    num_open: Mapping[int, int], oldest: Oldest, batch: int, steady: int, step: int, max_lag: int
) -> bool:
    """Whether a batch is complete, and what stays can leave in time: with `steady` groups leaving in each of
    the next steps, none has to wait until it is too old.
    """
    if not any(num_open.values()):
        return True
    chosen = leaving(num_open, oldest, batch)
    if len(chosen) < batch:
        return False
    ages = [step - oldest[group] for group in num_open.keys() - set(chosen)]
    return all(sum(age + later >= max_lag for age in ages) <= later * steady for later in range(max_lag))
