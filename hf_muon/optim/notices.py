# SPDX-License-Identifier: Apache-2.0
"""Log lines of the optimizer; lines that would repeat are written once per process."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable

import torch

logger = logging.getLogger("hf_muon.optim")


@functools.cache
def warn_once(message: str) -> None:
    """Log `message` as a warning the first time it is given; `warn_once.cache_clear()` forgets."""
    logger.warning(message)


@functools.cache
def inform_once(message: str) -> None:
    """Log `message` at INFO level the first time it is given."""
    logger.info(message)


def shorten(names: list[str], limit: int = 3) -> str:
    """Return the first names and how many more there are."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def warn_about_low_precision(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Say once which parameters are in half precision, where small updates are rounded away."""
    low = [(label, param) for label, param in named if param.dtype in (torch.bfloat16, torch.float16)]
    if low:
        warn_once(
            f"Parameters in {str(low[0][1].dtype).removeprefix('torch.')} have no float32 master copy"
            f" ({shorten([label for label, _ in low])}): updates smaller than the spacing of the weights are"
            " rounded away. Load the model in float32 and train with bf16=True."
        )
