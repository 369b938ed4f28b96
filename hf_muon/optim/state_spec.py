# SPDX-License-Identifier: Apache-2.0
"""What the options ask of optimizer state beside a parameter's own shape: dtypes, place of rest, further entries."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..config import MuonConfig

ROW_STATISTICS = "row_second_moment"  # state key of NorMuon
MOMENTUM_SCALE = "momentum_scale"  # state key of quantized momentum; never in a state dict
OPTIONAL_KEYS = (ROW_STATISTICS, MOMENTUM_SCALE)  # in the order of the fields of `MuonEntry`


@dataclass(frozen=True)
class StateSpec:
    """Options of a whole optimizer that decide how its state is stored; the default is plain Muon and AdamW.

    Attributes:
        low_precision_momentum: momentum rests in bfloat16.
        quantized: momentum rests as codes of eight bits with a scale per block.
        offload: momentum rests in CPU memory.
        row_statistics: Muon keeps a second moment per output row (NorMuon).
        elsewhere: another replica owns the matrix and holds its momentum.
        wide_adam: AdamW averages of bfloat16 parameters are float32, because their updates are rounded randomly.
    """

    low_precision_momentum: bool = False
    quantized: bool = False
    offload: bool = False
    row_statistics: bool = False
    wide_adam: bool = False
    elsewhere: bool = False

    def momentum_dtype(self, param: Tensor) -> torch.dtype:
        """Return the dtype that the momentum of `param` rests in; uint8 for codes."""
        return torch.uint8 if self.quantized else self.plain_dtype(param)

    def plain_dtype(self, param: Tensor) -> torch.dtype:
        """Return the dtype of the momentum of `param` in a state dict."""
        if self.quantized:
            return torch.float32
        return torch.bfloat16 if self.low_precision_momentum else torch.promote_types(param.dtype, torch.float32)

    def momentum_device(self, param: Tensor) -> torch.device:
        """Return where the momentum of `param` rests."""
        return torch.device("cpu") if self.offload and not param.is_meta else param.device

    def adam_dtype(self, param: Tensor) -> torch.dtype:
        """Return the dtype of the AdamW averages of `param`."""
        return torch.float32 if self.wide_adam and param.dtype == torch.bfloat16 else param.dtype


@functools.cache
def specs_of(config: MuonConfig) -> tuple[StateSpec, StateSpec]:
    """Return what `config` asks of the state of a matrix of this rank, and of one that another replica owns."""
    return spec_of(config), replace(spec_of(config), elsewhere=True)


@functools.cache
def spec_of(config: MuonConfig) -> StateSpec:
    """Return what `config` asks of the state."""
    return StateSpec(
        low_precision_momentum=config.momentum_dtype == "bfloat16",
        quantized=config.momentum_dtype == "int8",
        offload=config.offload == "cpu",
        row_statistics=config.normuon,
        wide_adam=config.stochastic_rounding == "true",
    )
