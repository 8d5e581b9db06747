"""User code may fork: a process that comes back out of it into ours is a copy of ours, and leaves at once."""

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator


@contextlib.contextmanager
def this_process_only() -> Iterator[None]:
    """Around a call of user code: a process that it forked does not go on behind the block.

    Such a child ends there as a program does at its end: with 0, with the code of its SystemExit, or with 1
    after the traceback of what it raised. Handlers of our process (atexit, finally) do not run in it.
    """
    caller = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() != caller:
            _leave(error)
        raise
    if os.getpid() != caller:
        _leave(None)


def _leave(error: BaseException | None) -> None:
    code = 0
    try:
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            if code and not isinstance(error.code, int):
                print(error.code, file=sys.stderr)
        elif error is not None:
            code = 1
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code & 0xFF)
