# SPDX-License-Identifier: Apache-2.0
"""The trusted side: start one child per program, wait for its answer, leave nothing behind."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pickle
import secrets
import selectors
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

LAYERS = ("namespaces", "landlock", "seccomp")
_MAX_REPORT = 1 << 16  # bytes
_SYSTEM = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/usr/share/zoneinfo")
_DEVICES = ("/dev/urandom", "/dev/random", "/dev/zero")


class SandboxError(RuntimeError):
    """This system cannot contain a program, or the guard itself failed; nothing of the program ran."""

    exit_code = 2


@dataclasses.dataclass(frozen=True)
class Program:
    """A program and what it must do.

    Attributes:
        source: the generated program.
        setup: trusted code that runs before it in the same module.
        checks: trusted statements that run after it, one by one; each must pass.
        function: name of the function that `inputs` are given to.
        inputs: argument lists; the outputs are compared with those of `reference`.
        reference: trusted source that defines `function` as well.
        tolerance: absolute tolerance of numbers in the outputs.
    """

    source: str
    setup: str = ""
    checks: tuple[str, ...] = ()
    function: str = ""
    inputs: tuple[Any, ...] = ()
    reference: str = ""
    tolerance: float = 0.0


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one program may use. CPU time decides, so that a busy machine changes nothing; wall time ends sleepers."""

    cpu_seconds: int = 8
    wall_seconds: float = 60.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20
    folder_bytes: int = 16 << 20
    folder_files: int = 256
    open_files: int = 64
    threads: int = 64


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Whether every check ran and passed, why not, and what this system left uncontained."""

    passed: bool
    reason: str = ""
    missing: tuple[str, ...] = ()


def run_program(
    program: Program, limits: Limits | None = None, *, require: bool = True, layers: tuple[str, ...] = LAYERS
) -> Outcome:
    """Run one program in a child of its own and return what became of it.

    Args:
        program: what to run.
        limits: what it may use.
        require: refuse to run where something stays uncontained.
        layers: which layers to use; fewer show that each one holds by itself.

    Raises:
        SandboxError: the child could not be contained and `require` holds, or this is not Linux.

    Note:
        About 0.1 s of start-up on one core; nothing is left running and no file stays.
    """
    if not sys.platform.startswith("linux"):
        raise SandboxError(
            "generated programs must run on Linux; got another system. Use a Linux container or machine."
        )
    limits = limits or Limits()
    proof = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="hf-muon-program-") as name:
        folder = str(Path(name).resolve())
        request = {
            **dataclasses.asdict(program),
            "program": program.source,
            "folder": folder,
            "limits": dataclasses.asdict(limits),
            "proof": proof,
            "require": require,
            "layers": layers,
            **_visible_files(_mentions_numpy(program)),
        }
        report = _converse(pickle.dumps(request), folder, limits.wall_seconds)
    return _judge(report, proof)


def _mentions_numpy(program: Program) -> bool:
    return any("numpy" in text for text in (program.source, program.setup, program.reference, *program.checks))


def _visible_files(numpy: bool) -> dict[str, list[str]]:
    library = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), str(Path(os.__file__).resolve().parent)]
    library.append(str(Path(sys.base_prefix).resolve() / "lib"))
    packages = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}) if numpy else []
    return {"readable": [*library, *packages, *_SYSTEM, *_DEVICES], "packages": packages}


def _command() -> list[str]:
    # Like -I (no user site, no current folder, no environment of the user), but the fixed hash seed is still read:
    # the order of a set of strings must not change from run to run.
    safe_path = ["-P"] if sys.version_info >= (3, 11) else []
    here = str(Path(__file__).resolve().parents[1])
    start = (
        f"import sys; sys.path[:] = [p for p in sys.path if p]; sys.path.append({here!r}); "
        "from sandbox.guard import main; del sys.path[-1]; main()"
    )
    return [sys.executable, "-s", "-S", "-B", *safe_path, "-c", start]


def _converse(request: bytes, folder: str, seconds: float) -> bytes | None:
    """Send the request, return the report; None when the time was up."""
    child = subprocess.Popen(
        _command(),
        cwd=folder,
        env={"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(request)
            child.stdin.close()
        return _read(child.stdout.fileno(), time.monotonic() + seconds)
    finally:
        # The whole session: with the child goes its process tree, where it has one of its own.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.stdout.close()
        child.wait()


def _read(handle: int, deadline: float) -> bytes | None:
    report = b""
    with selectors.DefaultSelector() as ready:
        ready.register(handle, selectors.EVENT_READ)
        while len(report) < _MAX_REPORT:
            if not ready.select(max(0.0, deadline - time.monotonic())):
                return None
            piece = os.read(handle, _MAX_REPORT)
            if not piece:
                break
            report += piece
    return report


def _judge(report: bytes | None, proof: str) -> Outcome:
    if report is None:
        return Outcome(False, "out of time")
    answers = []
    for line in report.splitlines():
        with contextlib.suppress(ValueError):
            answers.append(json.loads(line))
    answers = [answer for answer in answers if isinstance(answer, dict)]
    proven = [answer for answer in answers if answer.get("proof") == proof]  # the program can write lines as well
    for answer in proven:
        if "refused" in answer:
            raise SandboxError(_refusal(answer["refused"]))
    passed = bool(proven)
    last: dict[str, Any] = answers[-1] if answers else {}
    reason = "" if passed else str(last.get("reason", "ended before its checks did"))[:300]
    missing = last.get("missing", ())
    return Outcome(passed, reason, tuple(map(str, missing)) if isinstance(missing, list) else ())


def _refusal(missing: list[str]) -> str:
    return (
        f"this system cannot keep a generated program from {', '.join(map(str, missing))}; nothing was run. "
        "Use a container or machine of its own there, and --accept-weak-sandbox."
    )


@functools.cache
def uncontained() -> tuple[str, ...]:
    """Return what this system cannot keep a program from: found by running an empty one."""
    return run_program(Program(""), require=False).missing
