"""The keys of one attempt in a store that outlives it.

torchrun's agents keep their store while they start workers again, and workers of an earlier attempt have left
their addresses there: a rank that reads one of them before it is replaced waits for a process that is gone.

consumes: a store that all ranks reach. produces: the same store below a prefix of this attempt's own. waits
for: all ranks. unblocked by: their greetings, or the deadline.
"""

import time
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING

from siirl.errors import DeadlineError

if TYPE_CHECKING:
    from torch.distributed import PrefixStore, Store

POLL_S = 0.02


def attempt_store(store: "Store", rank: int, world_size: int, timeout: timedelta) -> "PrefixStore":
    """The store for the ranks that run now. Called by all of them; DeadlineError where some do not come.

    Each rank says hello under a name that nobody has had; rank 0 answers each name with the attempt's, until
    all ranks have come in. A greeting that an earlier process has left is answered too, and nobody reads it.
    Numbers of restarts would not do: agents of several machines count them differently.
    """
    from torch.distributed import PrefixStore

    if rank == 0:
        attempt = uuid.uuid4().hex
        _welcome(store, attempt, world_size, timeout)
    else:
        name = uuid.uuid4().hex
        store.set(f"hello/{rank}", name)
        store.wait([f"welcome/{name}"], timeout)
        attempt = store.get(f"welcome/{name}").decode()
        store.set(f"here/{attempt}/{rank}", "")
    return PrefixStore(attempt, store)


def _welcome(store: "Store", attempt: str, world_size: int, timeout: timedelta) -> None:
    deadline = time.monotonic() + timeout.total_seconds()
    missing, answered = set(range(1, world_size)), set()
    while True:
        for rank in sorted(missing):
            if store.check([f"hello/{rank}"]) and (name := store.get(f"hello/{rank}")) not in answered:
                answered.add(name)
                store.set(f"welcome/{name.decode()}", attempt)
            if store.check([f"here/{attempt}/{rank}"]):
                missing.remove(rank)
        if not missing:
            return
        if time.monotonic() > deadline:
            shown = ", ".join(map(str, sorted(missing)[:20]))
            raise DeadlineError(
                f"{len(missing)} of {world_size} ranks did not start within {timeout.total_seconds():g} s "
                f"(trainer.deadline_s): {shown}. Look at their machines' logs of torchrun."
            )
        time.sleep(POLL_S)
