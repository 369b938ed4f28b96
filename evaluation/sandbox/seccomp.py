# SPDX-License-Identifier: Apache-2.0
"""A system-call filter: no sockets, no new processes, no signals, no changes of other people's files or limits.

References: seccomp(2), `struct sock_filter` of linux/filter.h, the system-call tables of Linux 6.x.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

# Name: (x86_64, aarch64). None where the architecture has no such call.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # network, and message queues that outlive a process
    **{"socket": (41, 198), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180)},
    # processes and sessions
    **{"fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281)},
    **{"setpgid": (109, 154), "setsid": (112, 157), "unshare": (272, 97), "setns": (308, 268)},
    # signals and other processes
    **{"kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138)},
    **{"rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434)},
    **{"pidfd_getfd": (438, 438), "ptrace": (101, 117), "process_vm_readv": (310, 270)},
    **{"process_vm_writev": (311, 271), "kcmp": (312, 272), "process_madvise": (440, 440)},
    **{"setpriority": (141, 140), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119)},
    **{"sched_setaffinity": (203, 122), "sched_setattr": (314, 274), "ioprio_set": (251, 30)},
    # what Landlock does not cover: owners, modes, times and attributes of files; truncate before its third version
    **{"chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452)},
    **{"chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54)},
    **{"utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88)},
    **{"setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14)},
    **{"lremovexattr": (198, 15), "fremovexattr": (199, 16), "truncate": (76, 45)},
    # mounts
    **{"mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51)},
    **{"open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsmount": (432, 432)},
    **{"fspick": (433, 433), "mount_setattr": (442, 442), "open_by_handle_at": (304, 265)},
    # memory that no limit counts, and doors into the kernel
    **{"memfd_create": (319, 279), "memfd_secret": (447, 447), "bpf": (321, 280), "perf_event_open": (298, 241)},
    **{"userfaultfd": (323, 282), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219)},
    **{"io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427)},
    **{"init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106)},
    **{"kexec_load": (246, 104), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225)},
    **{"sethostname": (170, 161), "setdomainname": (171, 162), "settimeofday": (164, 170)},
    **{"clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266), "acct": (163, 89)},
    **{"quotactl": (179, 60), "personality": (135, 92), "fanotify_init": (300, 262), "setrlimit": (160, 164)},
}
# Refused as well where no Landlock guards the files: then nothing may be written anywhere.
_WRITING: dict[str, tuple[int | None, int | None]] = {
    **{"creat": (85, None), "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None), "unlink": (87, None)},
    **{"unlinkat": (263, 35), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276)},
    **{"link": (86, None), "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36)},
    **{"mknod": (133, None), "mknodat": (259, 33)},
}
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_CLONE, _OPEN, _OPENAT, _PRLIMIT = (56, 220), (2, None), (257, 56), (302, 261)
_CLONE3, _OPENAT2 = 435, 437  # their arguments lie in memory, where a filter cannot look: "no such call"
_LAST_KNOWN = 462  # newer calls are not there either
_CLONE_THREAD = 0x10000
_OPEN_FOR_WRITING = 0o1 | 0o2 | 0o100 | 0o1000  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_REFUSE, _ABSENT = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
_LOAD, _EQUAL, _GREATER, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06


def install(*, may_write: bool) -> bool:
    """Filter the system calls of this thread and of all it starts, for good; needs no_new_privs.

    Args:
        may_write: leave files to another guard; else opening a file for writing and changing folders is refused.

    Returns:
        Whether the filter is in force.
    """
    if platform.machine() not in _ARCHITECTURES:
        return False
    program = _program(*_ARCHITECTURES[platform.machine()], may_write)
    code = b"".join(struct.pack("=HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code, len(code))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    arguments = Program(len(program), ctypes.cast(buffer, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.prctl(22, 2, ctypes.byref(arguments), 0, 0) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def _program(column: int, architecture: int, may_write: bool) -> list[tuple[int, int, int, int]]:
    names = _REFUSED if may_write else _REFUSED | _WRITING
    lines: list[tuple[int, int, int, int]]
    lines = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    lines += [(_GREATER, 0, 1, _LAST_KNOWN), (_RETURN, 0, 0, _ABSENT)]  # x32 calls lie above as well
    for number in (_CLONE3, _OPENAT2):
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ABSENT)]
    for numbers in names.values():
        if (refused := numbers[column]) is not None:
            lines += [(_EQUAL, 0, 1, refused), (_RETURN, 0, 0, _REFUSE)]
    # A clone that is no thread is a process. Offsets: struct seccomp_data, arguments of 8 bytes from 16 on.
    lines += _when(_CLONE[column], [(_LOAD, 0, 0, 16), (_ANY_BIT, 1, 0, _CLONE_THREAD), (_RETURN, 0, 0, _REFUSE)])
    limits = [(_LOAD, 0, 0, 32), (_EQUAL, 0, 2, 0), (_LOAD, 0, 0, 36), (_EQUAL, 1, 0, 0), (_RETURN, 0, 0, _REFUSE)]
    lines += _when(_PRLIMIT[column], limits)  # reading a limit is fine: the new value is a null pointer
    if not may_write:
        for opening, offset in ((_OPEN[column], 24), (_OPENAT[column], 32)):
            if opening is not None:
                flags = [(_LOAD, 0, 0, offset), (_ANY_BIT, 0, 1, _OPEN_FOR_WRITING), (_RETURN, 0, 0, _REFUSE)]
                lines += _when(opening, flags)
    return [*lines, (_RETURN, 0, 0, _ALLOW)]


def _when(number: int | None, body: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """Return lines that run `body` for one call, then allow it unless the body returned."""
    assert number is not None  # the three calls exist on every architecture here
    body = [*body, (_RETURN, 0, 0, _ALLOW)]
    return [(_EQUAL, 0, len(body), number), *body]
