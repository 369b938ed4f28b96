# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding to bfloat16: up or down at random, so that the mean over many steps is the float32 value.

Rounding to nearest drops every update smaller than half the spacing of the numbers; a random choice with the right
odds keeps it in the mean. Random bits come from a generator of their own, seeded by (seed, step, name), so a resumed
run draws the same ones and torch's global generators are not touched.

References: Zamirai et al., "Revisiting BFloat16 Training", arXiv:2010.06192.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .notices import shorten, warn_once
from .tensor_layout import shard_coordinates

STEP_KEY = "rounding_step"  # in the parameter group: travels with checkpoints
_KEPT_BITS = -65536  # 0xFFFF0000: sign, exponent and the seven fraction bits of bfloat16


@dataclass(frozen=True)
class Rounding:
    """The random bits of one step of one group.

    Args:
        seed: `rounding_seed` of the configuration, equal on all ranks.
        step: number of steps of the group so far.
    """

    seed: int
    step: int

    def store_(self, target: Tensor, values: Tensor, name: str, param: Tensor) -> None:
        """Write `values` into `target`, stochastically where it is bfloat16 and they are wider.

        Values that bfloat16 can hold, inf and NaN are stored as they are.

        Args:
            target: this rank's part, any dtype and device.
            values: same shape, on any device.
            name: what the bits belong to: equal names draw equal bits in one step.
            param: the parameter; ranks that hold other rows of it draw other bits, replicas the same.

        Note:
            Replicas need one device type: generators of CPU and CUDA draw different bits from one seed.
        """
        if target.dtype == torch.bfloat16 and values.dtype != torch.bfloat16:
            values = round_to_bfloat16(values, self._generator(name, param, values.device))
        target.copy_(values)

    def _generator(self, name: str, param: Tensor, device: torch.device) -> torch.Generator:
        text = f"{self.seed}/{self.step}/{shard_coordinates(param)}/{name}"
        number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        return torch.Generator(device=device).manual_seed(number % 2**63)


def rounding_of(group: dict[str, Any], seed: int) -> Rounding:
    """Return the bits of the step that `group` is about to make, and count the step."""
    group[STEP_KEY] = group.get(STEP_KEY, 0) + 1
    return Rounding(seed, group[STEP_KEY])


def round_to_bfloat16(values: Tensor, generator: torch.Generator) -> Tensor:
    """Return `values` rounded to one of the two bfloat16 neighbours, the nearer one with the higher probability.

    The probability of rounding away from zero is the dropped part of the fraction, exact to 2**-16, so the mean is
    `values`. inf and NaN stay.

    Args:
        values: any shape; read as float32.
        generator: on the device of `values`.

    Note:
        Two float32-sized buffers at the peak.
    """
    wide = values.float()
    noise = torch.randint(0, 65536, wide.shape, dtype=torch.int32, generator=generator, device=wide.device)
    rounded = noise.add_(wide.view(torch.int32)).bitwise_and_(_KEPT_BITS).view(torch.float32)
    return torch.where(wide.isfinite(), rounded, wide).to(torch.bfloat16)


def warn_about_low_precision(named: Iterable[tuple[str, Tensor]], choice: str) -> None:
    """Say once that weights without a float32 master lose small updates, unless the user has chosen.

    Args:
        named: all parameters.
        choice: `stochastic_rounding`; `auto` means that nobody has chosen.
    """
    low = [(name, p) for name, p in named if p.dtype in (torch.bfloat16, torch.float16)]
    low = [(name, p) for name, p in low if choice == "auto" or (choice == "true" and p.dtype == torch.float16)]
    if low:
        warn_once(
            f"Parameters in {str(low[0][1].dtype).removeprefix('torch.')} have no float32 master copy"
            f" ({shorten([name for name, _ in low])}): updates smaller than the spacing of the weights are rounded"
            " away. Load the model in float32 and train with bf16=True, or set stochastic_rounding=true (bfloat16)."
        )
