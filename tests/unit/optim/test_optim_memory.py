# SPDX-License-Identifier: Apache-2.0
"""What a step needs beyond parameters, gradients and states, counted allocation by allocation."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from hf_muon import MuonWithAuxAdam
from hf_muon.param_groups.views import MatrixView
from hf_muon.planning.allocations import AllocationCounter

LAYERS = 4
MODELS = {
    "SmolLM2": ({(576, 576): 2, (192, 576): 2, (1536, 576): 2, (576, 1536): 1}, MatrixView()),
    "fused projections": ({(1536, 512): 1, (512, 512): 1, (512, 1024): 1}, MatrixView()),
    "fused qkv": ({(1536, 512): 1}, MatrixView(parts=(512, 512, 512))),
    "experts": ({(32, 96, 128): 2}, MatrixView()),
}


def test_the_counter_counts():
    with AllocationCounter() as allocations:
        first = torch.zeros(1000)
        second = first * 2
        del first
        second.add_(1).view(10, 100)
        del second
        torch.zeros(500)
    assert allocations.peak == 8000


@pytest.mark.parametrize("name", MODELS)
def test_step_needs_at_most_one_and_a_half_batches_of_equal_matrices(name):
    shapes, view = MODELS[name]
    params = [nn.Parameter(torch.randn(shape)) for shape, each in shapes.items() for _ in range(each * LAYERS)]
    optimizer = MuonWithAuxAdam([{"params": params, "matrix_views": [view] * len(params), "use_muon": True}], lr=1e-3)
    for _ in range(2):
        for param in params:
            param.grad = torch.randn_like(param)
        with AllocationCounter() as allocations:
            optimizer.step()
    batches = Counter(param.shape for param in params)
    largest = max(4 * shape.numel() * count for shape, count in batches.items())
    assert 0.05 * largest < allocations.peak <= 1.5 * largest
