"""In the place of SGLang's detokenizer, which has nothing to do: requests and answers are token ids."""

import ctypes
import signal
from typing import Any

from siirl.engines.rollout.served.server import PR_SET_PDEATHSIG


def run_idle(*arguments: Any) -> None:
    """Sleep until the process ends that has started this one."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    while True:
        signal.pause()
