"""The system calls that the sandbox needs and Python lacks, through ctypes. Each raises OSError."""

import ctypes
import os

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
