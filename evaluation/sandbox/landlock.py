# SPDX-License-Identifier: Apache-2.0
"""Landlock: which files can be read, which written; no TCP; no signals or abstract sockets to the outside.

References: landlock(7), Documentation/userspace-api/landlock.rst of Linux.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the same numbers on every architecture
_WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 14
_DEVICES_AND_SOCKETS = 1 << 6 | 1 << 9 | 1 << 11  # make_char, make_sock, make_block
# Version of the interface: number of file rights that it knows. Version 3 is the first that holds truncation back.
_RIGHTS = {3: 15, 4: 15, 5: 16}
OLDEST = 3


def version() -> int:
    """Return the version that the kernel offers; 0 where it offers none."""
    return max(0, ctypes.CDLL(None, use_errno=True).syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1)))


def restrict(readable: Iterable[str], writable: Iterable[str]) -> int:
    """Confine this thread and all it starts, for good; needs no_new_privs.

    Args:
        readable: files and folders that can be read.
        writable: folders in which everything but device files and sockets can be made.

    Returns:
        The version in force; 0 if there is none, or one too old to hold all writing back.
    """
    offered = version()
    if offered < OLDEST:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    everything = (1 << _RIGHTS.get(offered, 16)) - 1
    network = 3 if offered >= 4 else 0  # bind and connect of TCP
    scopes = 3 if offered >= 6 else 0  # abstract sockets and signals
    fields = (everything, network, scopes)[: 1 if offered < 4 else 2 if offered < 6 else 3]
    attributes = (ctypes.c_uint64 * len(fields))(*fields)
    ruleset = libc.syscall(_CREATE, attributes, ctypes.c_size_t(ctypes.sizeof(attributes)), ctypes.c_uint32(0))
    if ruleset < 0:
        return 0
    try:
        for paths, rights in (
            (readable, _READ_FILE | _READ_DIR),
            (writable, everything & ~_DEVICES_AND_SOCKETS & ~1),
            (("/dev/null",), _READ_FILE | _WRITE_FILE | _TRUNCATE),
        ):
            for path in paths:
                _allow(libc, ruleset, path, rights)
        return offered if libc.syscall(_RESTRICT, ruleset, ctypes.c_uint32(0)) == 0 else 0
    finally:
        os.close(ruleset)


def _allow(libc: ctypes.CDLL, ruleset: int, path: str, rights: int) -> None:
    class Rule(ctypes.Structure):
        _pack_ = 1
        _layout_ = "ms"
        _fields_ = (("rights", ctypes.c_uint64), ("parent", ctypes.c_int32))

    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # what is not there needs no right
    if not os.path.isdir(path):
        rights &= _READ_FILE | _WRITE_FILE | _TRUNCATE
    rule = Rule(rights, handle)
    libc.syscall(_ADD, ruleset, ctypes.c_int(1), ctypes.byref(rule), ctypes.c_uint32(0))
    os.close(handle)
