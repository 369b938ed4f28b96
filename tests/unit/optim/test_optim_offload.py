# SPDX-License-Identifier: Apache-2.0
"""Offloaded momentum: the same bits, fetched one batch ahead. CUDA streams are exercised in tests/gpu alone."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_muon.optim import MuonWithAuxAdam, functional
from hf_muon.optim.functional import MuonEntry, MuonOptions, StepVariants, muon_update_
from hf_muon.optim.momentum_storage import DirectLane, RestingMomentum
from hf_muon.param_groups.views import MatrixView

OPTIONS = MuonOptions(0.1, 0.01, 0.9, True, "standard", 5, "keller", "float32", "original")


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offload_is_bit_for_bit_no_offload(make_model, give_gradients, snapshot, same, dtype, nesterov) -> None:
    def run(offload: str) -> list[torch.Tensor]:
        model = make_model(0)
        options = {"offload": offload, "momentum_dtype": dtype, "nesterov": nesterov, "weight_decay": 0.1}
        optimizer = MuonWithAuxAdam(model.named_parameters(), lr=0.01, **options)
        for step in range(4):
            give_gradients(model, step)
            optimizer.step()
            if step == 1:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        return snapshot(optimizer)

    assert same(run("none"), run("cpu"))


class Recorder(DirectLane):
    """Tells in which order copies start, and keeps what is on its way apart from what has arrived."""

    def __init__(self, log: list[str], names: dict[int, str]) -> None:
        self.log, self.names, self.under_way = log, names, set()

    def bring(self, resting, device):
        moved = super().bring(resting, device)
        assert moved.data_ptr() != resting.data_ptr()
        self.names[moved.data_ptr()] = self.names[resting.data_ptr()]
        self.log.append(f"bring {self.names[resting.data_ptr()]}")
        self.under_way.add(moved.data_ptr())
        return moved

    def arrive(self, moved):
        self.under_way.remove(moved.data_ptr())

    def send(self, moved, resting):
        self.log.append(f"send {self.names[resting.data_ptr()]}")
        super().send(moved, resting)


def test_the_next_batch_is_on_its_way_before_newton_schulz_of_this_one(monkeypatch) -> None:
    momenta = [torch.randn(6, 9) for _ in range(3)]
    names = {momentum.data_ptr(): str(i) for i, momentum in enumerate(momenta)}
    entries = [MuonEntry(torch.randn(6, 9), torch.randn(6, 9), momentum, MatrixView()) for momentum in momenta]
    plain = copy.deepcopy(entries)
    log: list[str] = []
    lane = Recorder(log, names)
    original = functional.newton_schulz_many

    def watched(*args, **kwargs):
        log.append("products")
        return original(*args, **kwargs)

    monkeypatch.setattr(functional, "newton_schulz_many", watched)
    muon_update_(entries, OPTIONS, max_batch_bytes=1, variants=StepVariants(momentum=RestingMomentum(None, lane)))
    assert log == [
        "bring 0", "send 0", "bring 1", "products", "send 1", "bring 2", "products", "send 2", "products",
    ]  # fmt: skip
    assert not lane.under_way
    muon_update_(plain, OPTIONS, max_batch_bytes=1)
    for one, other in zip(entries, plain, strict=True):
        assert torch.equal(one.param, other.param)
        assert torch.equal(one.momentum, other.momentum)
