# SPDX-License-Identifier: Apache-2.0
"""A small tagged model and its gradients, for the optimizer's unit tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from hf_muon.optim.notices import inform_once, warn_once


class Tiny(nn.Module):
    """Embedding and norm on AdamW, two matrices on Muon."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.up = nn.Linear(8, 12)
        self.norm = nn.LayerNorm(12)
        self.down = nn.Linear(12, 6, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(torch.tanh(self.up(self.embed(ids)))))


def tag(model: nn.Module) -> nn.Module:
    for name, param in model.named_parameters():
        param.use_muon = name in ("up.weight", "down.weight")
    return model


@pytest.fixture(autouse=True)
def _forget_once_only_lines() -> Iterator[None]:
    warn_once.cache_clear()
    inform_once.cache_clear()
    yield


@pytest.fixture
def make_model() -> Callable[[int], nn.Module]:
    def make(seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return tag(Tiny())

    return make


@pytest.fixture
def give_gradients() -> Callable[..., None]:
    def give(model: nn.Module, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)

    return give


def snapshot(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Every parameter and every state tensor, copied."""
    tensors = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            tensors.append(param.detach().clone())
            tensors += [value.clone() for _, value in sorted(optimizer.state[param].items())]
    return tensors


@pytest.fixture(name="snapshot")
def snapshot_fixture() -> Callable[[torch.optim.Optimizer], list[torch.Tensor]]:
    return snapshot


@pytest.fixture
def same() -> Callable[[list[torch.Tensor], list[torch.Tensor]], bool]:
    def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
        return len(left) == len(right) and all(map(torch.equal, left, right))

    return equal
