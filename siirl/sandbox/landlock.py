"""Landlock: a process takes away its own right to touch files. Needs no privilege. Linux 5.13 and later.

Source: Linux, Documentation/userspace-api/landlock.rst.
"""

import ctypes
import os
import struct
from collections.abc import Iterable

from siirl.sandbox.linux import call

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same on every architecture
VERSION_FLAG, RULE_PATH_BENEATH = 1, 1

READ_BITS = 1 << 0 | 1 << 2 | 1 << 3  # execute, read a file, list a directory
READ_FILE_BITS = 1 << 0 | 1 << 2
WRITE_FILE_BITS = READ_FILE_BITS | 1 << 1  # of a single file, such as /dev/null
FILE_BITS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}  # by first version
NET_BITS, SCOPES = 0b11, 0b11  # TCP bind and connect (4); abstract sockets and signals (6)


def version() -> int:
    """The Landlock version of the kernel; 0 if there is none."""
    try:
        return call(CREATE_RULESET, None, 0, VERSION_FLAG)
    except OSError:
        return 0


def restrict(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Leave this process only these paths and what is below them; set PR_SET_NO_NEW_PRIVS before.

    Nothing where the kernel has no Landlock. Paths that do not exist are left out. OSError if refused.
    """
    abi = version()
    if not abi:
        return
    handled = FILE_BITS[max(first for first in FILE_BITS if first <= abi)]
    attribute = struct.pack("=QQQ", handled, NET_BITS if abi >= 4 else 0, SCOPES if abi >= 6 else 0)
    attribute = attribute[: 8 if abi < 4 else 16 if abi < 6 else 24]
    ruleset = call(CREATE_RULESET, ctypes.c_char_p(attribute), len(attribute), 0)
    for path in readable:
        _allow(ruleset, path, READ_BITS if os.path.isdir(path) else READ_FILE_BITS)
    for path in writable:
        _allow(ruleset, path, handled if os.path.isdir(path) else WRITE_FILE_BITS)
    call(RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, bits: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    rule = struct.pack("=Qi", bits, descriptor)
    call(ADD_RULE, ruleset, RULE_PATH_BENEATH, ctypes.c_char_p(rule), 0)
    os.close(descriptor)
