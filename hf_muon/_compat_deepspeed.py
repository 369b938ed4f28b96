# SPDX-License-Identifier: Apache-2.0
"""The version gate of DeepSpeed and the one private method of it that hf-muon wraps.

Tested with DeepSpeed 0.19.8; canaries in tests/architecture/test_compat_deepspeed.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import metadata
from types import ModuleType
from typing import Any

MINIMUM = "0.19.8"


def require_deepspeed() -> None:
    """Check that DeepSpeed is there and new enough, without importing it.

    Raises:
        ImportError: it is missing, or older than 0.19.8, whose engine differs from what the tests have seen.
    """
    from packaging.version import Version

    try:
        found = metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        raise ImportError('DeepSpeed is not installed. Run: pip install "hf-muon[deepspeed]"') from None
    if Version(found) < Version(MINIMUM):
        raise ImportError(
            f'deepspeed must be at least {MINIMUM}; got {found}. Run: pip install --upgrade "hf-muon[deepspeed]"'
        )


def wrap_configure_optimizer(engine_module: ModuleType, around: Callable[..., Any]) -> None:
    """Make `DeepSpeedEngine._configure_optimizer` call `around(original, engine, optimizer, parameters)`; idempotent.

    The method runs after DeepSpeed has exchanged expert modules and before it partitions the optimizer, so only here
    can groups be split for expert parallelism; when it returns, the partitions exist. `deepspeed.initialize` offers
    no public hook between or after the two that an optimizer could use.
    """
    engine_class = engine_module.DeepSpeedEngine
    original = engine_class._configure_optimizer
    if getattr(original, "hf_muon_wrapper", False):
        return

    @functools.wraps(original)
    def wrapper(self: Any, client_optimizer: Any, model_parameters: Any) -> Any:
        return around(functools.partial(original, self), self, client_optimizer, model_parameters)

    wrapper.hf_muon_wrapper = True  # type: ignore[attr-defined]
    engine_class._configure_optimizer = wrapper
