# SPDX-License-Identifier: Apache-2.0
"""Test-only switches that let DeepSpeed and Accelerate run together on CPU processes, and a pool of such processes."""

import contextlib
import os

from tests.support.worker_pool import RanksFailed, WorkerPool

_POOLS = {}


def enable():
    """Switch it on in this process, before DeepSpeed is imported (idempotent)."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # DeepSpeed compiles its own Newton-Schulz at import
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    import deepspeed.ops as deepspeed_ops
    import transformers.training_args as training_args
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    # init_distributed would build this operator with a compiler: minutes, and a lock that outlives a killed build.
    deepspeed_ops.__compatible_ops__["deepspeed_shm_comm"] = False
    training_args.is_torch_bf16_gpu_available = lambda: True  # bf16=True needs use_cpu else, which turns DeepSpeed off
    original = PartialState._prepare_backend
    if getattr(original, "on_cpu", False):
        return

    def on_cpu(self, cpu=False, sagemaker_dp=False, backend=None):
        """Accelerate never selects DeepSpeed without an accelerator: without a backend it means one process."""
        chosen, kind = original(self, cpu, sagemaker_dp, backend)
        if kind == DistributedType.NO and not cpu and int(os.environ.get("LOCAL_RANK", -1)) != -1:
            return "gloo", DistributedType.MULTI_CPU
        return chosen, kind

    on_cpu.on_cpu = True
    PartialState._prepare_backend = on_cpu


@contextlib.contextmanager
def fresh(rank, world_size):
    """Give the block torchrun's variables and new singletons of Accelerate and transformers."""
    from accelerate import state
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    before = dict(os.environ)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({key: str(value) for key, value in place.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    state.AcceleratorState._reset_state(True)
    state.GradientState._reset_state()
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()
        unset_hf_deepspeed_config()
        os.environ.clear()
        os.environ.update(before)


def _on_rank(job, args, kwargs):
    import torch

    enable()
    with fresh(torch.distributed.get_rank(), torch.distributed.get_world_size()):
        return job(*args, **kwargs)


def _import_libraries():
    enable()
    from transformers import Trainer

    return Trainer.__name__


def run(job, *args, world_size=2, timeout=120, **kwargs):
    """Call `job` on every rank of a pool of its own (DeepSpeed changes its process for good); return the values.

    Raises:
        RanksFailed: a rank raised, died or hung; the pool is then made anew.
    """
    pool = _POOLS.get(world_size)
    if pool is None:
        os.environ.update(DS_ACCELERATOR="cpu", TORCHDYNAMO_DISABLE="1")
        try:
            pool = _POOLS[world_size] = WorkerPool(world_size)
        finally:
            del os.environ["DS_ACCELERATOR"], os.environ["TORCHDYNAMO_DISABLE"]
        # Not part of the job's limit: importing takes minutes on a busy machine, a job seconds.
        pool.run(_import_libraries, (), {}, 280)
    outcomes = pool.run(_on_rank, (job, args, kwargs), {}, timeout)
    if not all(outcome.ok for outcome in outcomes):
        close()
        raise RanksFailed(outcomes)
    return [outcome.value for outcome in outcomes]


def close():
    """End the processes."""
    while _POOLS:
        _POOLS.popitem()[1].close()
