# SPDX-License-Identifier: Apache-2.0
"""Private names that data parallelism touches; the rules of `_compat.py` hold here too.

Canaries: tests/architecture/test_compat_ddp.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._compat import _wrap_method


def empty_wrapper(subclass: type, like: Any) -> Any:
    """Return a tensor of `subclass` that looks like `like` and has no memory.

    DTensor and torch's own quantized tensors are made this way; there is no public constructor.
    """
    import torch

    return torch.Tensor._make_wrapper_subclass(
        subclass, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
    )


def plain_torch_function(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Run `func` on tensor subclasses without turning its results into the subclass.

    `Tensor.__torch_function__` converts every result; torch documents this function only as a class attribute.
    """
    import torch

    return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})


def has_comm_hook(ddp: Any) -> bool:
    """Return whether a communication hook was registered on a DistributedDataParallel; only one may be."""
    return bool(ddp._comm_hooks)


def joins_uneven_inputs(ddp: Any) -> bool:
    """Return whether a DistributedDataParallel runs inside its `join()` now; it keeps this to itself."""
    return bool(ddp._join_config.enable)


def wrap_prepare(around: Callable[..., Any]) -> None:
    """Make `Accelerator.prepare` call `around(original, accelerator, *args)` (public, wrapped in place).

    Accelerate has no hook after it wraps a model; here model and optimizer come together, in one order on all ranks.
    """
    from accelerate.accelerator import Accelerator

    _wrap_method(Accelerator, "prepare", around)


def wrap_save_state(around: Callable[..., Any]) -> None:
    """Make `Accelerator.save_state` call `around(original, accelerator, *args)` (public, wrapped in place).

    Its public hook cannot be set before an Accelerator exists, and none runs after the save.
    """
    from accelerate.accelerator import Accelerator

    _wrap_method(Accelerator, "save_state", around)
