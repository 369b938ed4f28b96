# SPDX-License-Identifier: Apache-2.0
"""Log lines of the optimizer; lines that would repeat are written once per process."""

from __future__ import annotations

import functools
import logging

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
