"""The system calls that the sandbox needs and Python lacks, through ctypes. Each raises OSError."""

import ctypes
import os
import struct
from collections.abc import Iterable

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
MS_REC, MS_PRIVATE = 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
CAPABILITY_VERSION = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def call(number: int, *arguments: object) -> int:
    """A system call by its number; integers are passed as 64-bit."""
    passed = (ctypes.c_long(value) if isinstance(value, int) else value for value in arguments)
    return _check(_libc.syscall(ctypes.c_long(number), *passed), f"system call {number}")


def prctl(option: int, *arguments: object) -> int:
    """prctl(2); missing arguments are 0."""
    passed = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in arguments]
    passed += [ctypes.c_ulong(0)] * (4 - len(passed))
    return _check(_libc.prctl(option, *passed), f"prctl({option})")


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), f"unshare({flags:#x})")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    encoded = [text.encode() if text else None for text in (source, target, kind)]
    result = _libc.mount(*encoded, ctypes.c_ulong(flags), data.encode() if data else None)
    _check(result, f"mount of {source or kind} on {target}")


def unmount(target: str) -> None:
    """Detach a mount; it goes away when nothing uses it any more."""
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"unmount of {target}")


def drop_capabilities() -> None:
    """Give up all capabilities of this thread."""
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same on every architecture
VERSION_FLAG, RULE_PATH_BENEATH = 1, 1

READ_BITS = 1 << 0 | 1 << 2 | 1 << 3  # execute, read a file, list a directory
READ_FILE_BITS = 1 << 0 | 1 << 2
WRITE_FILE_BITS = READ_FILE_BITS | 1 << 1  # of a single file, such as /dev/null
FILE_BITS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}  # by first version
NET_BITS, SCOPES = 0b11, 0b11  # TCP bind and connect (4); abstract sockets and signals (6)


def landlock_version() -> int:
    """The Landlock version of the kernel; 0 if there is none."""
    try:
        return call(CREATE_RULESET, None, 0, VERSION_FLAG)
    except OSError:
        return 0


def restrict_files(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Leave this process only these paths and what is below them; set PR_SET_NO_NEW_PRIVS before.

    Nothing where the kernel has no Landlock. Paths that do not exist are left out. OSError if refused.
    """
    abi = landlock_version()
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
