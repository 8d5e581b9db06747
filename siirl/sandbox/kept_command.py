"""Runs a shell command under a keeper: `python -I -S kept_command.py PIPE COMMAND`.

It ends as the command does, with the same exit code or signal, once no process of it is left; and when the
other end of PIPE, the descriptor of a socket, is closed, once it has killed them all.
"""

import os
import signal
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from siirl.sandbox.keeper import keep

sys.path.pop(0)


def main() -> None:
    """The process."""
    pipe, command = int(sys.argv[1]), sys.argv[2]
    os.set_inheritable(pipe, False)
    keep(pipe)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and would hand that on
        signal.signal(number, signal.SIG_DFL)
    os.execv("/bin/sh", ["sh", "-c", command])


if __name__ == "__main__":
    main()
