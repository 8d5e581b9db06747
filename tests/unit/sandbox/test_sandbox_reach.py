"""Which system calls of a program in mode `process` reach other processes of its user: none.

The filter is tried in a process of its own that may otherwise do anything: what it does not refuse, the
kernel would do, so that every refusal is the filter's.
"""

import json
import os
import platform
import subprocess
import sys
import time

import psutil
import pytest

from siirl.sandbox import seccomp

pytestmark = pytest.mark.skipif(platform.machine() not in seccomp.MACHINES, reason="no filter for it")

PID, GROUP, USER, BUFFER, PIDFD = "pid", "group", "user", "buffer", "pidfd"

# name: (number on x86_64, on aarch64, arguments). Written down from the kernel's own tables.
REACHING = {
    "kill": (62, 129, (PID, 0)),
    "kill a group": (62, 129, (GROUP, 0)),
    "kill everybody": (62, 129, (-1, 0)),
    "kill the own group": (62, 129, (0, 0)),
    "tkill": (200, 130, (PID, 0)),
    "tgkill": (234, 131, (PID, PID, 0)),
    "rt_sigqueueinfo": (129, 138, (PID, 0, BUFFER)),
    "rt_tgsigqueueinfo": (297, 240, (PID, PID, 0, BUFFER)),
    "pidfd_open": (434, 434, (PID, 0)),
    "pidfd_send_signal": (424, 424, (PIDFD, 0, 0, 0)),
    "pidfd_getfd": (438, 438, (PIDFD, 0, 0)),
    "process_mrelease": (448, 448, (PIDFD, 0)),
    "process_madvise": (440, 440, (PIDFD, BUFFER, 0, 20, 0)),
    "ptrace": (101, 117, (16, PID, 0, 0)),
    "process_vm_readv": (310, 270, (PID, BUFFER, 1, BUFFER, 1, 0)),
    "process_vm_writev": (311, 271, (PID, BUFFER, 1, BUFFER, 1, 0)),
    "kcmp": (312, 272, (PID, PID, 0, 0, 0)),
    "perf_event_open": (298, 241, (BUFFER, PID, -1, -1, 0)),
    "get_robust_list": (274, 100, (PID, BUFFER, BUFFER)),
    "setpriority of a process": (141, 140, (0, PID, 1)),
    "setpriority of a group": (141, 140, (1, PID, 1)),
    "setpriority of a user": (141, 140, (2, USER, 1)),
    "ioprio_set of a process": (251, 30, (1, PID, 3 << 13)),
    "ioprio_set of a group": (251, 30, (2, PID, 3 << 13)),
    "ioprio_set of a user": (251, 30, (3, USER, 3 << 13)),
    "sched_setparam": (142, 118, (PID, BUFFER)),
    "sched_setscheduler": (144, 119, (PID, 0, BUFFER)),
    "sched_setaffinity": (203, 122, (PID, 8, BUFFER)),
    "sched_setattr": (314, 274, (PID, BUFFER, 0)),
    "prlimit64": (302, 261, (PID, 7, 0, BUFFER)),
    "prctl PR_SCHED_CORE": (157, 167, (62, 2, PID, 0, 0)),
    "migrate_pages": (256, 238, (PID, 64, BUFFER, BUFFER)),
    "move_pages": (279, 239, (PID, 0, 0, 0, 0, 0)),
    "fcntl F_SETOWN": (72, 25, (0, 8, PID)),
    "fcntl F_SETOWN of a group": (72, 25, (0, 8, GROUP)),
    "fcntl F_SETOWN_EX": (72, 25, (0, 15, BUFFER)),
    "fcntl F_SETSIG": (72, 25, (0, 10, 9)),
    "ioctl FIOSETOWN": (16, 29, (0, 0x8901, BUFFER)),
    "ioctl SIOCSPGRP": (16, 29, (0, 0x8902, BUFFER)),
    "shmget": (29, 194, (0, 4096, 0o1777)),
    "shmat": (30, 196, (0, 0, 0)),
    "shmctl": (31, 195, (0, 0, 0)),
    "semget": (64, 190, (0, 1, 0o1777)),
    "semop": (65, 193, (0, BUFFER, 1)),
    "semtimedop": (220, 192, (0, BUFFER, 1, 0)),
    "semctl": (66, 191, (0, 0, 0, 0)),
    "msgget": (68, 186, (0, 0o1777)),
    "msgsnd": (69, 189, (0, BUFFER, 8, 0)),
    "msgrcv": (70, 188, (0, BUFFER, 8, 0, 0o4000)),
    "msgctl": (71, 187, (0, 0, 0)),
    "mq_open": (240, 180, (BUFFER, 0, 0, 0)),
    "mq_unlink": (241, 181, (BUFFER,)),
    "setns": (308, 268, (PIDFD, 0)),
    "clone of a process": (56, 220, (17, 0, 0, 0, 0)),
    "clone3": (435, 435, (BUFFER, 88)),
}
# What a program may do to itself.
OWN = {
    "kill": (62, 129, ("own", 0)),
    "sched_setaffinity, as 0": (203, 122, (0, 8, "affinity")),
    "sched_setaffinity": (203, 122, ("own", 8, "affinity")),
    "prlimit64, reading": (302, 261, (0, 7, 0, BUFFER)),
    "prctl PR_GET_DUMPABLE": (157, 167, (3, 0, 0, 0, 0)),
    "fcntl F_GETFD": (72, 25, (0, 1, 0)),
    "getpriority": (140, 141, (0, 0)),
}

WITHIN = """
import ctypes, json, os, sys
from siirl.sandbox import seccomp
from siirl.sandbox.linux import PR_SET_NO_NEW_PRIVS, prctl

calls, victim = json.loads(sys.argv[1]), int(sys.argv[2])
libc = ctypes.CDLL(None, use_errno=True)
buffer = ctypes.create_string_buffer(256)
affinity = ctypes.create_string_buffer(
    sum(1 << cpu for cpu in os.sched_getaffinity(0) if cpu < 64).to_bytes(8, "little"), 8
)
pidfd = os.pidfd_open(victim)
values = {
    "pid": victim, "group": -victim, "user": os.getuid(), "pidfd": pidfd, "own": os.getpid(),
    "buffer": ctypes.addressof(buffer), "affinity": ctypes.addressof(affinity),
}
prctl(PR_SET_NO_NEW_PRIVS, 1)
seccomp.restrict(os.getpid())
answers = {}
for name, (number, arguments) in calls.items():
    ctypes.set_errno(0)
    passed = [ctypes.c_long(values.get(value, value)) for value in arguments]
    result = libc.syscall(ctypes.c_long(number), *passed)
    if name.startswith("clone") and result == 0:
        os._exit(0)
    answers[name] = ctypes.get_errno() if result < 0 else 0
print(json.dumps(answers))
"""


def tried(calls):
    column = seccomp.MACHINES[platform.machine()][1]
    given = {name: (row[column], row[2]) for name, row in calls.items()}
    victim = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        while psutil.Process(victim.pid).status() != psutil.STATUS_SLEEPING:
            time.sleep(0.01)
        before = state_of(victim.pid)
        done = subprocess.run(
            [sys.executable, "-c", WITHIN, json.dumps(given), str(victim.pid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            start_new_session=True,
        )
        assert done.returncode == 0, done.stderr
        assert state_of(victim.pid) == before
        return json.loads(done.stdout)
    finally:
        victim.kill()
        victim.wait()


def state_of(pid):
    """What others could do to it: end or stop it, its priority, its cores, its scheduler."""
    return (
        psutil.Process(pid).status(),
        os.getpriority(os.PRIO_PROCESS, pid),
        os.sched_getaffinity(pid),
        os.sched_getscheduler(pid),
    )


def test_no_call_reaches_another_process_of_the_same_user():
    answers = tried(REACHING)
    expected = {
        name: {"clone of a process": 11, "clone3": 38}.get(name, 1) for name in REACHING
    }  # EAGAIN, ENOSYS, EPERM
    assert answers == expected


def test_a_program_may_do_to_itself_what_libraries_do():
    assert tried(OWN) == dict.fromkeys(OWN, 0)


def test_the_table_of_calls_names_each_number_once():
    for column in (0, 1):
        numbers = [row[column] for row in seccomp.CALLS.values() if row[column] is not None]
        assert len(numbers) == len(set(numbers))
