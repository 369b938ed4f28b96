# SPDX-License-Identifier: Apache-2.0
"""Namespaces: an own process tree, an empty network, an own small file system as the working folder.

References: user_namespaces(7), mount(2), capset(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import os

_NEW_USER = 0x10000000
_NEW_OTHERS = 0x00020000 | 0x08000000 | 0x20000000 | 0x40000000  # mounts, IPC, processes, network
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 2, 4, 8, 16384, 1 << 18
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _SIGKILL = 1, 38, 9
_CAPABILITY_VERSION = 0x20080522


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def separate() -> dict[str, bool]:
    """Move this process out of the system's namespaces as far as the system allows; its children get a new tree.

    Returns:
        Which of `user` and `others` (mounts, IPC, processes, network) took effect.
    """
    user, group = os.getuid(), os.getgid()
    if _libc().unshare(_NEW_USER | _NEW_OTHERS) == 0:
        with contextlib.suppress(OSError):  # without a map the process is nobody, which is safe but owns no mount
            _write("/proc/self/setgroups", "deny")
            _write("/proc/self/gid_map", f"{group} {group} 1")
            _write("/proc/self/uid_map", f"{user} {user} 1")
        return {"user": True, "others": True}
    return {"user": False, "others": _libc().unshare(_NEW_OTHERS) == 0}  # a root that may not make user namespaces


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def mount_own_folder(folder: str, num_bytes: int, num_files: int) -> bool:
    """Put an empty file system of limited size over `folder`, seen by this process and its children only."""
    libc = _libc()
    if libc.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None) != 0:
        return False
    options = f"size={num_bytes},nr_inodes={num_files},mode=0700".encode()
    flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    return libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", flags, options) == 0


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the one that started it ends."""
    _libc().prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)


def give_up_privileges() -> None:
    """Drop every capability, for good: root is then a user like any other."""

    class Header(ctypes.Structure):
        _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))

    libc = _libc()
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no_new_privs was refused")
    header, nothing = Header(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    if libc.capset(ctypes.byref(header), ctypes.byref(nothing)) != 0:
        raise OSError(ctypes.get_errno(), "capset was refused")
