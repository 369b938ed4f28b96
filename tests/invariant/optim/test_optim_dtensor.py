# SPDX-License-Identifier: Apache-2.0
"""DTensor parameters, in two processes: FSDP2 shards and owned matrices give the single-process result."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hf_muon.optim import MuonWithAuxAdam
from hf_muon.optim.notices import warn_once

STEPS, BAD_STEP = 4, 2
SHAPES = {"tall": (7, 5), "few_rows": (1, 6), "experts": (3, 4, 6)}
OPTIONS = {"lr": 0.05, "weight_decay": 0.1, "ns_dtype": "float32", "ns_method": "standard"}


class OwnedDTensor(DTensor):
    """Whole on its owner, no rows elsewhere, as the distributed runtime stores matrices."""

    is_owned = True

    @property
    def rows(self) -> slice:
        return slice(0, self.to_local().shape[0])


def start_values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return {name: torch.randn(shape, generator=generator) for name, shape in {**SHAPES, "bias": (5,)}.items()}


def gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(value.shape, generator=generator) for name, value in start_values().items()}


def groups_of(params: dict[str, nn.Parameter]) -> list[dict]:
    return [
        {"params": [(n, p) for n, p in params.items() if n != "bias"], "use_muon": True},
        {"params": [("bias", params["bias"])], "use_muon": False},
    ]


def reference() -> dict[str, torch.Tensor]:
    params = {name: nn.Parameter(value) for name, value in start_values().items()}
    optimizer = MuonWithAuxAdam(groups_of(params), **OPTIONS)
    for step in range(STEPS):
        if step != BAD_STEP:
            for name, grad in gradients(step).items():
                params[name].grad = grad
            optimizer.step()
    return {name: param.detach() for name, param in params.items()}


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, value in start_values().items():
            setattr(self, name, nn.Parameter(value))


def train_sharded(rank: int, expected: dict[str, torch.Tensor], on_device: bool | None) -> None:
    mesh = init_device_mesh("cpu", (2,))
    holder = Holder()
    fully_shard(holder, mesh=mesh)
    params = dict(holder.named_parameters())
    optimizer = MuonWithAuxAdam(groups_of(params), fused_adam="true" if on_device else "auto", **OPTIONS)
    optimizer.skip_on_device = on_device
    for step in range(STEPS):
        if step == 1:  # whole tensors, as a checkpoint of one process holds them
            saved = optimizer.state_dict()
            for state in saved["state"].values():
                for key in state:
                    state[key] = state[key].full_tensor() if isinstance(state[key], DTensor) else state[key]
            optimizer.load_state_dict(saved)
        for name, grad in gradients(step).items():
            params[name].grad = distribute_tensor(grad, mesh, params[name].placements)
        if step == BAD_STEP and rank == 1:  # only one rank sees it; both must skip
            params["tall"].grad.to_local().fill_(float("nan"))
        optimizer.step()
    assert optimizer.num_skipped_steps == 1
    assert isinstance(optimizer.state[params["tall"]]["momentum_buffer"], DTensor)
    for name, param in params.items():
        # Fused AdamW rounds differently from the plain loop; Muon's products are the same.
        torch.testing.assert_close(param.full_tensor().detach(), expected[name], rtol=0, atol=2e-6)


def train_owned(rank: int, expected: dict[str, torch.Tensor]) -> None:
    mesh = init_device_mesh("cpu", (2,))
    params: dict[str, nn.Parameter] = {}
    owners = {"tall": 0, "few_rows": 1, "experts": 1}

    def own(name: str, value: torch.Tensor) -> torch.Tensor:
        local = value if owners[name] == rank else value[:0]
        owned = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=value.shape, stride=value.stride())
        owned.__class__ = OwnedDTensor
        return owned

    for name, value in start_values().items():
        if name == "bias":
            params[name] = nn.Parameter(distribute_tensor(value, mesh, [Shard(0)]))
        else:
            params[name] = own(name, value).requires_grad_()  # the runtime's class makes it a Parameter
    optimizer = MuonWithAuxAdam(groups_of(params), **OPTIONS)
    for step in range(STEPS):
        if step == 1:  # a round trip in the middle changes nothing
            optimizer.load_state_dict(optimizer.state_dict())
            assert isinstance(optimizer.state[params["tall"]]["momentum_buffer"], OwnedDTensor)
        for name, grad in gradients(step).items():
            is_bias = name == "bias"
            params[name].grad = distribute_tensor(grad, mesh, [Shard(0)]) if is_bias else own(name, grad)
        if step == BAD_STEP and rank == 1:
            params["experts"].grad.to_local().fill_(float("inf"))
        optimizer.step()
    assert optimizer.num_skipped_steps == 1
    for name, owner in owners.items():
        local = params[name].to_local().detach()
        if owner == rank:
            assert torch.equal(local, expected[name])  # the same products on the same whole matrices
        else:
            assert local.numel() == 0
    torch.testing.assert_close(params["bias"].full_tensor().detach(), expected["bias"], rtol=0, atol=0)


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    try:
        expected = reference()
        records: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("hf_muon.optim").addHandler(handler)
        train_sharded(rank, expected, None)
        train_sharded(rank, expected, True)
        assert sum("gathers sharded gradients" in line for line in records) == 1, records
        warn_once.cache_clear()
        train_owned(rank, expected)
        assert sum("gathers sharded gradients" in line for line in records) == 1, records
        dist.barrier()
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")
def test_two_ranks_give_the_result_of_one(tmp_path: Path) -> None:
    mp.spawn(worker, args=(str(tmp_path),), nprocs=2, join=True)
