# SPDX-License-Identifier: Apache-2.0
"""Owners balanced by measured seconds: the same plan on all ranks, an error on all of them where files differ."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hf_muon
from hf_muon.distributed import ownership
from hf_muon.distributed.rates import DeviceRates, ShapeSeconds, device_name, read_rates
from tests.distributed import models
from tests.support.worker_pool import run_on_ranks


def make_rates(slow=1.0, device=None):
    """Rates under which a 64 x 64 matrix takes `slow` seconds and 16 x 16 one second, whatever the FLOPs."""
    rows = (ShapeSeconds(16, 16, "standard", 1.0), ShapeSeconds(64, 64, "standard", slow))
    return DeviceRates(device or device_name(torch.device("cpu")), "cpu", "float32", 1e9, 1e9, rows)


class Stack(nn.Module):
    """One matrix of 64 x 64 and four of 16 x 16: by FLOPs (and by 64 s) the large one stands alone."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(64, 64, bias=False), *(nn.Linear(16, 16, bias=False) for _ in range(4))]
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = self.layers[0](x)[..., :16]
        for layer in list(self.layers)[1:]:
            x = layer(x)
        return self.head(x)


def attach(kind, paths):
    """Return (owners, costs, warnings) under the file of this rank, or what was raised."""
    path = paths[dist.get_rank() % len(paths)]
    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logger = logging.getLogger("hf_muon.distributed")
    logger.addHandler(handler)
    torch.manual_seed(0)
    model = Stack()
    try:
        if kind == "fsdp2":
            models.shard(model, rates=path)
            plan = ownership(model)
        else:
            ddp = DistributedDataParallel(model)
            hf_muon.tag_parameters(model, exclude=("head",))
            optimizer = hf_muon.MuonWithAuxAdam(model.named_parameters(), lr=1e-3, rates=path)
            assert optimizer.dedicate_matrices(ddp)
            plan = ownership(ddp)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        logger.removeHandler(handler)
    return plan.owners, [matrix.cost for matrix in plan.matrices], plan.idle_ranks, warnings


@pytest.fixture
def files(tmp_path):
    paths = {}
    for name, rates in (("even", make_rates(1.0)), ("steep", make_rates(64.0)), ("other", make_rates(1.0, "a card"))):
        paths[name] = str(tmp_path / f"{name}.json")
        rates.write(paths[name])
    return paths


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_seconds_decide_who_owns_what(kind, files):
    for owners, costs, idle, warnings in run_on_ranks(2, attach, kind, [None]):
        assert len(set(owners[1:])) == 1 and owners[0] != owners[1]  # 64 times the FLOPs: alone
        assert costs[0] == 64 * costs[1] and not idle and not warnings
    results = run_on_ranks(2, attach, kind, [files["even"]])
    for owners, costs, _, warnings in results:
        assert owners == results[0][0]
        assert costs == pytest.approx([1.0] * 5)
        assert sorted(owners.count(rank) for rank in (0, 1)) == [2, 3]
        assert not warnings


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_files_that_differ_raise_on_every_rank(kind, files):
    for message in run_on_ranks(2, attach, kind, [files["even"], files["steep"]]):
        assert message.startswith("RuntimeError: ownership plan must be the same on every rank; got 2 plans")
        assert "rates agree" in message
    # Also where the figures differ but not one owner does, and where one rank alone has a file.
    for message in run_on_ranks(2, attach, kind, [files["even"], files["other"]]):
        assert "got 2 plans" in message
    for message in run_on_ranks(2, attach, kind, [None, files["steep"]]):
        assert "got 2 plans" in message


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_a_file_that_one_rank_cannot_read_stops_all(kind, files, tmp_path):
    absent = str(tmp_path / "absent.json")
    first, second = run_on_ranks(2, attach, kind, [files["even"], absent])
    assert first.startswith("RuntimeError: ranks must all be able to dedicate parameters; ranks [1] failed.")
    assert second.startswith(f"ValueError: rates must be a file that hf-muon calibrate wrote; got {absent} (No such")


def test_paths_may_differ_and_another_device_is_said_once(files, tmp_path):
    copy = tmp_path / "copy.json"
    read_rates(files["other"]).write(copy)
    (_, _, _, first), (_, _, _, second) = run_on_ranks(2, attach, "fsdp2", [files["other"], str(copy)])
    assert second == []
    assert len(first) == 1 and first[0].startswith("rates were measured on a card in float32, but this run uses cpu ")
