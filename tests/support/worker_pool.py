# SPDX-License-Identifier: Apache-2.0
"""Persistent gloo workers for distributed tests: one pool per world size, started once, rebuilt after a failure.

A test hands a module-level function to `run_on_ranks`; every rank calls it with the same arguments and its return
values come back in rank order. A fresh spawn imports torch in every process (seconds); a pooled call costs hundredths.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

GROUP_TIMEOUT = timedelta(seconds=40)  # below pytest's and the pool's own limits: torch's message is the better one


@dataclass
class Outcome:
    """What one rank did: a value, an error text, or nothing (killed, hung)."""

    value: Any = None
    error: str | None = None
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.error is None


class RanksFailed(AssertionError):
    """Some rank raised, died or hung; the message holds every rank's story."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes
        parts = [f"--- rank {rank}\n{outcome.error or 'finished'}" for rank, outcome in enumerate(outcomes)]
        super().__init__("a rank failed\n" + "\n".join(parts))


def _serve(rank: int, world_size: int, folder: str, pipe: Any) -> None:
    stacks = open(Path(folder) / f"stacks.{rank}", "w")  # noqa: SIM115 (faulthandler keeps it for good)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        if job is None:
            return
        function, args, kwargs = job
        try:
            pipe.send(("value", function(*args, **kwargs)))
        except BaseException:
            pipe.send(("error", traceback.format_exc()))


class WorkerPool:
    """`world_size` processes with a gloo group over all of them."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory(prefix="hf-muon-pool-", ignore_cleanup_errors=True)
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        os.environ["OMP_NUM_THREADS"] = "1"
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world_size, self._folder.name, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any, timeout: float) -> list[Outcome]:
        """Call `function` on every rank; return what each did. Never waits longer than `timeout`."""
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))
        outcomes: dict[int, Outcome] = {}
        start = time.monotonic()
        deadline = start + timeout
        while len(outcomes) < self.world_size and time.monotonic() < deadline:
            waiting = {self._pipes[rank]: rank for rank in range(self.world_size) if rank not in outcomes}
            for pipe in multiprocessing.connection.wait(list(waiting), timeout=0.5):
                rank = waiting[pipe]
                outcome = self._receive(rank)
                outcome.seconds = time.monotonic() - start
                outcomes[rank] = outcome
        for rank in range(self.world_size):
            if rank not in outcomes:
                outcomes[rank] = Outcome(error=f"still running after {timeout:.0f} s\n{self._stacks(rank)}")
        return [outcomes[rank] for rank in range(self.world_size)]

    def _receive(self, rank: int) -> Outcome:
        try:
            kind, payload = self._pipes[rank].recv()
        except (EOFError, ConnectionError):
            self._processes[rank].join(2)
            return Outcome(error=f"ended with exit code {self._processes[rank].exitcode}")
        return Outcome(value=payload) if kind == "value" else Outcome(error=payload)

    def _stacks(self, rank: int) -> str:
        process = self._processes[rank]
        if not process.is_alive():
            return f"ended with exit code {process.exitcode}"
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return (Path(self._folder.name) / f"stacks.{rank}").read_text()

    def close(self) -> None:
        """End the workers that this pool started."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join(5)
        self._folder.cleanup()


_POOLS: dict[int, WorkerPool] = {}


def run_on_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0, **kwargs: Any
) -> list[Any]:
    """Call `function(*args, **kwargs)` on `world_size` ranks; return their values in rank order.

    Raises:
        RanksFailed: any rank raised, died, or was still running after `timeout` seconds.
    """
    outcomes = outcomes_on_ranks(world_size, function, *args, timeout=timeout, **kwargs)
    if not all(outcome.ok for outcome in outcomes):
        raise RanksFailed(outcomes)
    return [outcome.value for outcome in outcomes]


def outcomes_on_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0, **kwargs: Any
) -> list[Outcome]:
    """Like `run_on_ranks`, but return each rank's outcome also when some failed (fault tests)."""
    pool = _POOLS.get(world_size)
    if pool is None:
        pool = _POOLS[world_size] = WorkerPool(world_size)
    try:
        outcomes = pool.run(function, args, kwargs, timeout)
    except BaseException:
        _drop(world_size)
        raise
    if not all(outcome.ok for outcome in outcomes):
        _drop(world_size)
    return outcomes


def _drop(world_size: int) -> None:
    pool = _POOLS.pop(world_size, None)
    if pool is not None:
        pool.close()


@atexit.register
def close_pools() -> None:
    """End every pool."""
    for world_size in list(_POOLS):
        _drop(world_size)
    sys.stdout.flush()
