"""The system calls that a sandboxed program may not make, as a seccomp filter.

A list of refusals rather than of permissions: Python and its libraries make too many calls, and newer ones
every year. What is refused: the network, reaching other processes, privileges, and kernel interfaces that
have had more holes than uses (io_uring, bpf, userfaultfd, ...). Source: Linux, seccomp(2), bpf(4).
"""

import ctypes
import errno
import os
import struct

from siirl.sandbox.linux import PR_SET_PDEATHSIG, prctl

PR_SET_SECCOMP, MODE_FILTER = 22, 2
LOAD, EQUAL, AT_LEAST, ANY_BIT, AND, RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
ALLOW, KILL = 0x7FFF0000, 0x80000000
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
NEW_NAMESPACES, CLONE_THREAD, X32 = 0x7E020000, 0x00010000, 0x40000000
SOCK_TYPE, SOCK_STREAM = 0xF, 1

MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # audit name, column of CALLS

ALWAYS = "always refused"
OUTSIDE = "refused where the program shares the file system and the processes of the machine"
# name: (number on x86_64, number on aarch64, when); None: there is no such call
CALLS: dict[str, tuple[int | None, int | None, str]] = {
    "socket": (41, 198, ALWAYS),
    "connect": (42, 203, ALWAYS),
    "accept": (43, 202, ALWAYS),
    "accept4": (288, 242, ALWAYS),
    "bind": (49, 200, ALWAYS),
    "listen": (50, 201, ALWAYS),
    "ptrace": (101, 117, ALWAYS),
    "process_vm_readv": (310, 270, ALWAYS),
    "process_vm_writev": (311, 271, ALWAYS),
    "process_madvise": (440, 440, ALWAYS),
    "pidfd_getfd": (438, 438, ALWAYS),
    "kcmp": (312, 272, ALWAYS),
    "personality": (135, 92, ALWAYS),
    "memfd_create": (319, 279, ALWAYS),
    "memfd_secret": (447, 447, ALWAYS),
    "shmget": (29, 194, ALWAYS),
    "semget": (64, 190, ALWAYS),
    "msgget": (68, 186, ALWAYS),
    "mq_open": (240, 180, ALWAYS),
    "mq_unlink": (241, 181, ALWAYS),
    "shmat": (30, 196, ALWAYS),
    "shmctl": (31, 195, ALWAYS),
    "semop": (65, 193, ALWAYS),
    "semtimedop": (220, 192, ALWAYS),
    "semctl": (66, 191, ALWAYS),
    "msgsnd": (69, 189, ALWAYS),
    "msgrcv": (70, 188, ALWAYS),
    "msgctl": (71, 187, ALWAYS),
    "io_uring_setup": (425, 425, ALWAYS),
    "io_uring_enter": (426, 426, ALWAYS),
    "io_uring_register": (427, 427, ALWAYS),
    "bpf": (321, 280, ALWAYS),
    "perf_event_open": (298, 241, ALWAYS),
    "userfaultfd": (323, 282, ALWAYS),
    "fanotify_init": (300, 262, ALWAYS),
    "add_key": (248, 217, ALWAYS),
    "request_key": (249, 218, ALWAYS),
    "keyctl": (250, 219, ALWAYS),
    "mount": (165, 40, ALWAYS),
    "umount2": (166, 39, ALWAYS),
    "pivot_root": (155, 41, ALWAYS),
    "chroot": (161, 51, ALWAYS),
    "setns": (308, 268, ALWAYS),
    "unshare": (272, 97, ALWAYS),
    "open_tree": (428, 428, ALWAYS),
    "move_mount": (429, 429, ALWAYS),
    "fsopen": (430, 430, ALWAYS),
    "fsconfig": (431, 431, ALWAYS),
    "fsmount": (432, 432, ALWAYS),
    "fspick": (433, 433, ALWAYS),
    "mount_setattr": (442, 442, ALWAYS),
    "name_to_handle_at": (303, 264, ALWAYS),
    "open_by_handle_at": (304, 265, ALWAYS),
    "init_module": (175, 105, ALWAYS),
    "finit_module": (313, 273, ALWAYS),
    "delete_module": (176, 106, ALWAYS),
    "kexec_load": (246, 104, ALWAYS),
    "kexec_file_load": (320, 294, ALWAYS),
    "reboot": (169, 142, ALWAYS),
    "swapon": (167, 224, ALWAYS),
    "swapoff": (168, 225, ALWAYS),
    "sethostname": (170, 161, ALWAYS),
    "setdomainname": (171, 162, ALWAYS),
    "settimeofday": (164, 170, ALWAYS),
    "clock_settime": (227, 112, ALWAYS),
    "clock_adjtime": (305, 266, ALWAYS),
    "adjtimex": (159, 171, ALWAYS),
    "acct": (163, 89, ALWAYS),
    "quotactl": (179, 60, ALWAYS),
    "quotactl_fd": (443, 443, ALWAYS),
    "syslog": (103, 116, ALWAYS),
    "iopl": (172, None, ALWAYS),
    "ioperm": (173, None, ALWAYS),
    "tkill": (200, 130, OUTSIDE),
    "rt_sigqueueinfo": (129, 138, OUTSIDE),
    "rt_tgsigqueueinfo": (297, 240, OUTSIDE),
    "pidfd_send_signal": (424, 424, OUTSIDE),
    "pidfd_open": (434, 434, OUTSIDE),
    "process_mrelease": (448, 448, OUTSIDE),
    "setpriority": (141, 140, OUTSIDE),
    "ioprio_set": (251, 30, OUTSIDE),
    "migrate_pages": (256, 238, OUTSIDE),
    "move_pages": (279, 239, OUTSIDE),
    "get_robust_list": (274, 100, OUTSIDE),
    "fork": (57, None, OUTSIDE),
    "vfork": (58, None, OUTSIDE),
    "chmod": (90, None, OUTSIDE),
    "fchmod": (91, 52, OUTSIDE),
    "fchmodat": (268, 53, OUTSIDE),
    "fchmodat2": (452, 452, OUTSIDE),
    "chown": (92, None, OUTSIDE),
    "fchown": (93, 55, OUTSIDE),
    "lchown": (94, None, OUTSIDE),
    "fchownat": (260, 54, OUTSIDE),
    "utime": (132, None, OUTSIDE),
    "utimes": (235, None, OUTSIDE),
    "futimesat": (261, None, OUTSIDE),
    "utimensat": (280, 88, OUTSIDE),
    "setxattr": (188, 5, OUTSIDE),
    "lsetxattr": (189, 6, OUTSIDE),
    "fsetxattr": (190, 7, OUTSIDE),
    "removexattr": (197, 14, OUTSIDE),
    "lremovexattr": (198, 15, OUTSIDE),
    "fremovexattr": (199, 16, OUTSIDE),
    "setxattrat": (463, 463, OUTSIDE),
    "removexattrat": (466, 466, OUTSIDE),
    "file_setattr": (469, 469, OUTSIDE),
}
CLONE, CLONE3, SOCKETPAIR = (56, 220), (435, 435), (53, 199)
PRCTL, PRLIMIT64, FCNTL, IOCTL = (157, 167), (302, 261), (72, 25), (16, 29)
# Calls whose first argument is a process: the program's own, also as 0 where that means the caller.
KILLING = {"kill": (62, 129), "tgkill": (234, 131)}
SCHEDULING = {
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
}
PR_SCHED_CORE = 62
# Who gets the signals of a file: any process of the user, and any signal, so that it is kill by another name.
SIGNAL_OWNERS = {
    "fcntl": (8, 10, 15),
    "ioctl": (0x8901, 0x8902),
}  # F_SETOWN, F_SETSIG, ..._EX; FIOSETOWN, ...

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


def available() -> bool:
    """Whether the filter is written for this processor."""
    return os.uname().machine in MACHINES


def restrict(own_pid: int | None) -> None:
    """Install the filter in this process; set PR_SET_NO_NEW_PRIVS before. OSError if refused.

    own_pid: None where the program has a file system and process ids of its own; else its process id: it may
    then start no process, signal and schedule only itself, and change no attributes of files.
    """
    program = _program(own_pid)
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(buffer)))
    prctl(PR_SET_SECCOMP, MODE_FILTER, ctypes.c_void_p(ctypes.addressof(header)))


def _program(own_pid: int | None) -> list[Instruction]:
    audit_name, column = MACHINES[os.uname().machine]
    program = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, audit_name), (RETURN, 0, 0, KILL)]
    program += [(LOAD, 0, 0, NUMBER)]
    if column == 0:
        program += [(AT_LEAST, 0, 1, X32), _refuse(errno.ENOSYS)]
    for number_and_when in CALLS.values():
        number = number_and_when[column]
        if number is not None and (number_and_when[2] == ALWAYS or own_pid is not None):
            program += [(EQUAL, 0, 1, number), _refuse(errno.EPERM)]
    program += [(EQUAL, 0, 1, CLONE3[column]), _refuse(errno.ENOSYS)]  # its flags are out of a filter's reach
    threads_only = [] if own_pid is None else [(ANY_BIT, 1, 0, CLONE_THREAD), _refuse(errno.EAGAIN)]
    program += _with_argument(
        CLONE[column], 0, [(ANY_BIT, 0, 1, NEW_NAMESPACES), _refuse(errno.EPERM), *threads_only]
    )
    program += _with_argument(
        SOCKETPAIR[column],
        1,
        [(AND, 0, 0, SOCK_TYPE), (EQUAL, 1, 0, SOCK_STREAM), _refuse(errno.EPERM)],
    )
    program += _with_argument(PRLIMIT64[column], 0, [(EQUAL, 1, 0, 0), _refuse(errno.EPERM)])
    if own_pid is None:
        return [*program, *_without(PRCTL[column], 0, (PR_SET_PDEATHSIG,)), (RETURN, 0, 0, ALLOW)]
    program += _without(PRCTL[column], 0, (PR_SET_PDEATHSIG, PR_SCHED_CORE))
    program += _without(FCNTL[column], 1, SIGNAL_OWNERS["fcntl"])
    program += _without(IOCTL[column], 1, SIGNAL_OWNERS["ioctl"])
    for number in KILLING.values():
        program += _with_argument(number[column], 0, [(EQUAL, 1, 0, own_pid), _refuse(errno.EPERM)])
    for number in SCHEDULING.values():
        own = [(EQUAL, 2, 0, 0), (EQUAL, 1, 0, own_pid), _refuse(errno.EPERM)]
        program += _with_argument(number[column], 0, own)
    return [*program, (RETURN, 0, 0, ALLOW)]


def _with_argument(number: int, index: int, check: list[Instruction]) -> list[Instruction]:
    """For one call: check the low half of an argument; the call is allowed if the check falls through."""
    body = [(LOAD, 0, 0, ARGUMENTS + 8 * index), *check, (RETURN, 0, 0, ALLOW)]
    return [(EQUAL, 0, len(body), number), *body]


def _without(number: int, index: int, values: tuple[int, ...]) -> list[Instruction]:
    """For one call: refuse these values of an argument."""
    return _with_argument(
        number, index, [part for value in values for part in ((EQUAL, 0, 1, value), _refuse(errno.EPERM))]
    )


def _refuse(error: int) -> Instruction:
    return (RETURN, 0, 0, 0x00050000 | error)
