# SPDX-License-Identifier: Apache-2.0
"""Hostile programs: each attack works where nothing guards, and fails behind the layers, together and in part."""

import http.server
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from evaluation.sandbox.launcher import (
    LAYERS,
    Limits,
    Outcome,
    Program,
    SandboxError,
    _judge,
    run_program,
    uncontained,
)

QUICK = Limits(cpu_seconds=1, wall_seconds=40)
SECRET = "the-parent's-secret"

# Every attack is a program that passes when it gets what it wants.
ATTACKS = {
    "write_to_the_parent_folder": "open({folder!r} + '/stolen', 'w').write('x')",
    "append_to_a_file": "open({folder!r} + '/victim', 'a').write('x')",
    "truncate_a_file": "import os; os.truncate({folder!r} + '/victim', 0)",
    "remove_a_file": "import os; os.remove({folder!r} + '/victim')",
    "rename_a_file": "import os; os.rename({folder!r} + '/victim', {folder!r} + '/moved')",
    "make_a_folder": "import os; os.mkdir({folder!r} + '/new')",
    "change_the_mode_of_a_file": "import os; os.chmod({folder!r} + '/victim', 0o777)",
    "change_the_time_of_a_file": "import os; os.utime({folder!r} + '/victim', (1, 1))",
    "read_the_environment_of_the_parent": (
        "import os\nfound = b''\nfor name in [{parent}, os.getppid()]:\n"
        "    found += open(f'/proc/{{name}}/environ', 'rb').read()\nassert {secret!r}.encode() in found"
    ),
    "connect_to_loopback": "import socket; socket.create_connection(('127.0.0.1', {port}), 2).send(b'GET /')",
    "send_a_datagram": "import socket as s; s.socket(s.AF_INET, s.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))",
    "signal_the_parent": "import os; os.kill({parent}, 0)",
    "lower_the_limits_of_the_parent": (
        "import resource; resource.prlimit({parent}, resource.RLIMIT_CORE, (0, resource.getrlimit(4)[1]))"
    ),
}


@pytest.fixture(scope="module")
def surroundings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield {"folder": str(folder), "port": server.server_port, "parent": os.getpid(), "secret": SECRET}
    server.shutdown()
    server.server_close()


def attack(name, surroundings):
    with open(surroundings["folder"] + "/victim", "w") as file:
        file.write("untouched")
    return Program(ATTACKS[name].format(**surroundings))


def untouched(surroundings):
    with open(surroundings["folder"] + "/victim") as file:
        return os.listdir(surroundings["folder"]) == ["victim"] and file.read() == "untouched"


@pytest.mark.parametrize("layers", [LAYERS, ("landlock", "seccomp"), ("namespaces", "seccomp")], ids="+".join)
def test_every_attack_fails(layers, surroundings):
    if run_program(Program(""), require=False, layers=layers).missing:
        with pytest.raises(SandboxError, match="this system cannot keep a generated program from"):
            run_program(Program("raise SystemExit"), layers=layers)
        return
    for name in ATTACKS:
        outcome = run_program(attack(name, surroundings), QUICK, layers=layers)
        assert not outcome.passed, name
        # Refused by the system, not broken by a mistake in the attack.
        assert any(word in outcome.reason for word in ("PermissionError", "OSError", "NotFound", "Lookup")), outcome
        assert untouched(surroundings), name


def test_the_attacks_are_real(surroundings):
    """Without layers each attack reaches its aim, but the one on the environment: that has a test below."""
    for name in ATTACKS:
        if name != "read_the_environment_of_the_parent":
            outcome = run_program(attack(name, surroundings), QUICK, require=False, layers=())
            assert outcome.passed, (name, outcome)
            for file in os.scandir(surroundings["folder"]):
                os.rmdir(file) if file.is_dir() else os.remove(file)


def test_the_environment_of_another_process_is_closed():
    holder = os.spawnve(os.P_NOWAIT, "/bin/sleep", ["sleep", "30"], {"SECRET": SECRET})
    try:
        deadline = time.monotonic() + 10  # exec takes a moment
        while SECRET.encode() not in Path(f"/proc/{holder}/environ").read_bytes():
            assert time.monotonic() < deadline
        source = f"assert {SECRET!r}.encode() in open('/proc/{holder}/environ', 'rb').read()"
        for layers in (LAYERS, ("landlock", "seccomp"), ("namespaces", "seccomp")):
            outcome = run_program(Program(source), QUICK, require=False, layers=layers)
            assert not outcome.passed and "PermissionError" in outcome.reason
    finally:
        os.kill(holder, 9)
        os.waitpid(holder, 0)


LEAVING_EARLY = {
    "exit": "import sys; sys.exit(0)",
    "hard_exit": "import os; os._exit(0)",
    "exit_inside_the_function": "def f():\n    raise SystemExit(0)",
    "exit_at_the_end": "import atexit, os; atexit.register(os._exit, 0)\ndef f():\n    import sys; sys.exit()",
    "keyboard_interrupt": "def f():\n    raise KeyboardInterrupt",
    "forged_report": 'import os\nfor fd in range(3, 9):\n    try: os.write(fd, b\'{"proof": "0"}\\n\')\n'
    "    except OSError: pass\n"
    "os._exit(0)",
    "patched_assertion_error": "import builtins; builtins.AssertionError = type('Quiet', (), {})\ndef f(): return 2",
    "reads_stdin": "def f(): return int(input())",
    "endless_loop": "while True: pass",
    "endless_thread": "import threading as t, time\nt.Thread(target=time.sleep, args=(99,)).start()\nf = int",
    "fork_bomb": "import os\nwhile True: os.fork()",
    "thread_bomb": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(100,)).start()",
    "memory_bomb": "blocks = []\nwhile True: blocks.append(bytearray(1 << 26))",
    "output_flood": "while True: print('x' * 10000)",
    "report_flood": "import os\nwhile True: os.write(3, b'x' * 10000)",
    "start_a_program": "import subprocess; subprocess.run(['true'])\ndef f(): return 1",
    "endless_recursion": "import sys; sys.setrecursionlimit(10**9)\ndef g(n): return [g(n + 1)]\ng(0)",
    "kill_everyone": "import os; os.kill(-1, 9)\ndef f(): return 1",
}


def test_leaving_early_or_never_is_no_success():
    with ThreadPoolExecutor(4) as pool:
        programs = [Program(source, checks=("assert f() == 1",)) for source in LEAVING_EARLY.values()]
        outcomes = pool.map(lambda program: run_program(program, QUICK), programs)
        for name, outcome in zip(LEAVING_EARLY, outcomes, strict=True):
            assert not outcome.passed and outcome.reason, (name, outcome)


def test_a_sleeper_is_ended():
    outcome = run_program(Program("import time; time.sleep(100)"), Limits(wall_seconds=2))
    assert outcome == Outcome(False, "out of time")


def test_a_program_may_work_in_its_own_folder_within_bounds():
    write = "open('a', 'w').write('text')\ndef f(): return open('a').read()"
    assert run_program(Program(write, checks=("assert f() == 'text'",))).passed
    fill = (
        "written = 0\ntry:\n    for number in range(10000):\n        with open(str(number), 'wb') as file:\n"
        "            file.write(bytes(1 << 19)); written += 1 << 19\nexcept OSError:\n    full = True"
    )
    assert run_program(Program(fill, checks=(f"assert full and 0 < written <= {Limits().folder_bytes}",))).passed
    one = "try:\n    open('big', 'wb').write(bytes(1 << 22))\nexcept OSError:\n    full = True"
    assert run_program(Program(one, checks=("assert full",))).passed


def test_no_process_outlives_its_program(tmp_path):
    """The grandchild leaves its session and writes a file half a second later, unless its process tree went first."""
    mark = tmp_path / "alive"
    source = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(0.5)\n"
        f"        open({str(mark)!r}, 'w').write('x')\n    os._exit(0)\n"
    )
    assert run_program(Program(source), QUICK, require=False, layers=("namespaces",)).passed
    time.sleep(1.0)
    assert not mark.exists()
    run_program(Program(source), QUICK, require=False, layers=())
    time.sleep(1.0)
    assert mark.exists()


def test_the_program_sees_an_empty_environment_and_the_standard_library():
    source = "import os, sys, math, re, collections, heapq, itertools, random, datetime\nnames = set(os.environ)"
    check = "assert names <= {'PYTHONHASHSEED', 'OPENBLAS_NUM_THREADS', 'OMP_NUM_THREADS', 'LC_CTYPE'}, names"
    outcome = run_program(Program(source, checks=(check, "assert os.listdir('.') == []")))
    assert outcome == Outcome(True)
    assert not run_program(Program("import torch")).passed
    assert run_program(Program("import numpy\nassert numpy.zeros(3).sum() == 0")).passed


def test_the_order_of_a_set_is_the_same_in_every_run():
    order = "x = list({'apple', 'pear', 'plum', 'fig', 'kiwi', 'lime'})\nraise ValueError(x)"
    assert len({run_program(Program(order)).reason for _ in range(4)}) == 1


def test_a_report_counts_only_with_the_secret_of_its_run():
    assert _judge(b'noise\n{"proof": "a"}\n', "a").passed
    assert not _judge(b'{"proof": "b"}\n[1]\n{}\n\xff\n', "a").passed
    assert not _judge(b'{"refused": ["x"]}', "a").passed  # a program cannot stop the evaluation with a line of its own
    assert _judge(None, "a").reason == "out of time"


def test_where_nothing_contains_a_program_it_does_not_run(tmp_path):
    source = f"open({str(tmp_path / 'ran')!r}, 'w')"
    with pytest.raises(SandboxError, match=r"writing outside its own folder, .* nothing was run\. Use a container"):
        run_program(Program(source), layers=())
    assert not (tmp_path / "ran").exists()
    assert isinstance(uncontained(), tuple)


def test_another_system_is_refused(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(SandboxError, match="must run on Linux"):
        run_program(Program(""))
