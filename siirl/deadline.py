"""How long something may take, and for how long it has: by a clock that nobody sets. No torch."""

import time
from collections.abc import Callable


class Deadline:
    """So many seconds from now, or from the last `renew`: of a wait, a silence, a thing done now and then."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s
        self.renew()

    def renew(self) -> None:
        """Count from now."""
        self._since_s = time.monotonic()

    @property
    def passed_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._since_s

    @property
    def left_s(self) -> float:
        """Seconds until it is over; 0 from then on."""
        return max(0.0, self.wait_s - self.passed_s)

    @property
    def over(self) -> bool:
        return self.passed_s >= self.wait_s

    def due(self) -> bool:
        """Whether it is over; then it begins again, as what is done every wait_s seconds is done now."""
        if over := self.over:
            self.renew()
        return over

    def until(self, done: Callable[[], object], every_s: float) -> bool:
        """Wait until `done`, asked every so many seconds; False if it was not in time."""
        while not done():
            if self.over:
                return False
            time.sleep(min(every_s, self.left_s))
        return True
