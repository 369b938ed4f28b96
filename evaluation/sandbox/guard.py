# SPDX-License-Identifier: Apache-2.0
"""The first thing that runs in the child: close every door, then run the program and its checks.

Nothing of the program runs before all layers are in force. Success is one line with the secret of this run, written
after the last check, so leaving early by any exit is no success.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import resource
import signal as signals
import sys
import types
from typing import Any

from . import landlock, namespaces, seccomp
from .comparison import equal_outputs

LAYERS = ("namespaces", "landlock", "seccomp")
# What must hold, and which layers each is left without when it does not.
WRITES, NETWORK, ENVIRONMENT, PROCESSES = (
    "writing outside its own folder",
    "reaching the network",
    "reading the parent's environment",
    "leaving or signalling processes",
)


def main() -> None:
    """Serve one request from stdin and leave; never returns."""
    # The launcher is trusted and the program has not run yet: pickle carries tuples, sets and infinities.
    request = pickle.loads(sys.stdin.buffer.read())
    report = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)
    namespaces.die_with_parent()
    spaces = {"user": False, "others": False}
    if "namespaces" in request["layers"]:
        spaces = namespaces.separate()
    if spaces["others"] and (child := os.fork()):
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            signal = os.WTERMSIG(status)
            why = "out of CPU time" if signal in (signals.SIGKILL, signals.SIGXCPU) else f"killed by signal {signal}"
            _tell(report, {"reason": why})
        os._exit(0)
    namespaces.die_with_parent()
    try:
        missing = _close_doors(request, spaces)
    except OSError as error:
        _tell(report, {"refused": [f"{error}"], "proof": request["proof"]})
        os._exit(0)
    if missing and request["require"]:
        _tell(report, {"refused": missing, "proof": request["proof"]})
        os._exit(0)
    reason = _run(request)
    _tell(
        report, {"missing": missing, "reason": reason} if reason else {"missing": missing, "proof": request["proof"]}
    )
    os._exit(0)


def _tell(report: int, answer: dict[str, Any]) -> None:
    os.write(report, b"\n" + json.dumps(answer).encode() + b"\n")


def _close_doors(request: dict[str, Any], spaces: dict[str, bool]) -> list[str]:
    """Put every layer in force that the system has; return what is still open."""
    folder, limits, layers = request["folder"], request["limits"], request["layers"]
    own = spaces["others"] and namespaces.mount_own_folder(folder, limits["folder_bytes"], limits["folder_files"])
    os.chdir(folder)
    for name, value in (
        ("RLIMIT_CPU", limits["cpu_seconds"]),
        ("RLIMIT_AS", limits["memory_bytes"]),
        ("RLIMIT_FSIZE", limits["file_bytes"]),
        ("RLIMIT_NOFILE", limits["open_files"]),
        ("RLIMIT_CORE", 0),
    ):
        resource.setrlimit(getattr(resource, name), (value, value))
    if spaces["user"]:  # elsewhere the count is shared with everything that the user runs
        resource.setrlimit(resource.RLIMIT_NPROC, (limits["threads"], limits["threads"]))
    namespaces.give_up_privileges()
    # Without an own file system nothing bounds how much is written: then not even the own folder is open.
    locked = landlock.restrict(request["readable"], [folder] if own else []) if "landlock" in layers else 0
    filtered = seccomp.install(may_write=bool(locked)) if "seccomp" in layers else False
    holds = {
        WRITES: filtered,  # Landlock alone leaves modes, owners and times of files open
        NETWORK: filtered or spaces["others"],
        ENVIRONMENT: bool(locked) or spaces["user"],
        PROCESSES: filtered or spaces["others"],
    }
    return [door for door, closed in holds.items() if not closed]


def _run(request: dict[str, Any]) -> str:
    """Run the program and its checks; return why it failed, or nothing."""
    sys.path += request["packages"]
    module = types.ModuleType("program")
    sys.modules["program"] = module
    stage = "the program"
    try:
        _execute(request["setup"], module)
        expected = _expected_outputs(request)
        _execute(request["program"], module)
        for number, check in enumerate(request["checks"], start=1):
            stage = f"check {number}"
            _execute(check, module)
        for number, (arguments, wanted) in enumerate(expected, start=1):
            stage = f"input {number}"
            output = getattr(module, request["function"])(*copy.deepcopy(arguments))
            if not equal_outputs(request["function"], output, wanted, request["tolerance"]):
                return f"{stage}: wrong output"
    except BaseException as error:  # SystemExit and KeyboardInterrupt are failures too
        return f"{stage}: {type(error).__name__}: {error!s:.200}"
    return ""


def _execute(source: str, module: types.ModuleType) -> None:
    exec(compile(source, "program", "exec", dont_inherit=True), module.__dict__)


def _expected_outputs(request: dict[str, Any]) -> list[tuple[Any, Any]]:
    if not request["inputs"]:
        return []
    reference = types.ModuleType("reference")
    _execute(request["reference"], reference)
    function = getattr(reference, request["function"])
    return [(arguments, function(*copy.deepcopy(arguments))) for arguments in request["inputs"]]
