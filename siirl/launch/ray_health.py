"""Which worker of a Ray run is stopped, silent or stuck, by what the actors answer. Judged as elsewhere.

consumes      the last news of every worker that runs: its beat, its process's state and CPU time
produces      the first rank that will not go on; its stacks, and those of the others, in their logs
waits for     a little for actors to answer; who does not is for RankWatch to lose
"""

import time
from collections.abc import Sequence
from typing import Any

from siirl.launch.health import LOOK_S, STACKS_S, Health, Trouble
from siirl.launch.process import STACKS_TAKEN_S
from siirl.launch.ray_rank import Rank

ANSWER_S = 3.0
"""For an actor to signal its worker."""


class RayHealth:
    """Looks at the workers of all machines from time to time."""

    def __init__(self, patience_s: float):
        self._health = Health(patience_s)
        self._looked_s = 0.0

    def trouble(self, ranks: Sequence[Rank]) -> Trouble | None:
        """The first worker that will not go on, if a look is due and shows one. ranks: those that run.

        There is no look before all actors have answered since the last one: in time of which nothing is
        known, nobody was silent.
        """
        now_s = time.monotonic()
        heard_s = min((rank.replied_s for rank in ranks), default=0.0)
        if now_s < self._looked_s + LOOK_S or heard_s <= self._looked_s:
            return None
        self._looked_s = now_s
        beats = {rank.rank: rank.beat for rank in ranks}
        return self._health.look(now_s, beats, {rank.rank: rank.process for rank in ranks})

    def show_stacks(self, first: int, ranks: Sequence[Rank]) -> None:
        """All workers write their stacks. The one in trouble goes on for that if it was stopped.

        Meanwhile the others are held, and then all are killed: see Watch.show_stacks.
        """
        _answered([rank.actor.dump_stacks.remote() for rank in ranks])
        time.sleep(STACKS_S)
        (troubled,) = (rank for rank in ranks if rank.rank == first)
        if troubled.process is None or not troubled.process.is_stopped:
            return
        _answered([rank.actor.hold.remote() for rank in ranks if rank is not troubled])
        _answered([troubled.actor.go_on_for_stacks.remote()], STACKS_TAKEN_S + ANSWER_S)
        _answered([rank.actor.kill.remote() for rank in ranks if rank is not troubled])


def _answered(refs: list[Any], most_s: float = ANSWER_S) -> None:
    """Wait until these calls are done, or it takes too long."""
    import ray

    if refs:
        ray.wait(refs, num_returns=len(refs), timeout=most_s)
