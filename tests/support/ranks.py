# SPDX-License-Identifier: Apache-2.0
"""Run a function on several fresh gloo ranks with a hard time limit; returns what each rank returned.

Fresh processes, because Accelerate and Trainer keep state per process that a shared pool would carry along.
"""

import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class RankFailure(AssertionError):
    """One or more ranks raised, died or ran out of time."""


def run_ranks(function, world_size, *args, timeout=120, check=True):
    """Call `function(*args)` on `world_size` ranks, with torch.distributed's variables set as torchrun does.

    Args:
        function: a module-level function.
        world_size: number of processes; with 1 no rendezvous variables are set.
        *args: picklable arguments.
        timeout: seconds for all together; then every rank is killed and the test fails.
        check: raise where a rank failed; otherwise failures are returned as exceptions.

    Returns:
        List of return values by rank.
    """
    with tempfile.TemporaryDirectory() as scratch:
        job = Path(scratch) / "job"
        job.write_bytes(pickle.dumps((function.__module__, function.__qualname__, args)))
        processes = [_start(job, rank, world_size, Path(scratch)) for rank in range(world_size)]
        late = _wait(processes, timeout)
        results = [_result(Path(scratch), rank) for rank in range(world_size)]
    if late:
        raise RankFailure(f"ranks {late} did not end within {timeout} s\n" + _errors(results))
    if check and any(isinstance(result, Exception) for result in results):
        raise RankFailure(_errors(results))
    return results


def _start(job, rank, world_size, scratch):
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if world_size > 1:
        environment |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
            "HF_MUON_TEST_STORE": str(scratch / "store"),
        }
    log = (scratch / f"log{rank}").open("wb")
    command = [sys.executable, "-m", "tests.support.ranks", str(job), str(rank)]
    return subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )


def _wait(processes, timeout):
    import time

    end = time.monotonic() + timeout
    late = []
    for rank, process in enumerate(processes):
        try:
            process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            late.append(rank)
    for rank in late:
        os.killpg(processes[rank].pid, signal.SIGKILL)
        processes[rank].wait()
    return late


def _result(scratch, rank):
    path = scratch / f"result{rank}"
    if path.exists():
        value, error = pickle.loads(path.read_bytes())
        return RankFailure(f"rank {rank}: {error}") if error else value
    log = (scratch / f"log{rank}").read_text(errors="replace")[-4000:]
    return RankFailure(f"rank {rank} left no result; its output ends with:\n{log}")


def _errors(results):
    return "\n".join(str(result) for result in results if isinstance(result, Exception))


def _main(job, rank):
    module, name, args = pickle.loads(Path(job).read_bytes())
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    value, error = None, None
    try:
        if store := os.environ.get("HF_MUON_TEST_STORE"):
            world_size = int(os.environ["WORLD_SIZE"])
            dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
        value = getattr(importlib.import_module(module), name)(*args)
    except BaseException:
        error = traceback.format_exc()
    Path(job).with_name(f"result{rank}").write_bytes(pickle.dumps((value, error)))
    sys.stdout.flush()
    os._exit(1 if error else 0)


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
