# SPDX-License-Identifier: Apache-2.0
"""Version gates and every private upstream name that hf-muon touches, each with its reason.

Nothing else in the package may import a private name of torch, transformers or accelerate. Each entry says why
no public hook serves, and has a canary test in `tests/architecture` that fails when upstream changes.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

logger = logging.getLogger("hf_muon.compat")

# ---------------------------------------------------------------- transformers: `optim="dmuon"`
# Tested with transformers 5.x (canaries: tests/architecture/test_compat_transformers.py). Trainer has no plugin hook
# for optimizers: `TrainingArguments.__post_init__` accepts members of one enum and dispatch is one private dict.

OPTIMIZER_NAME = "dmuon"
_MEMBER_NAME = "DMUON"


def add_optimizer_name(training_args: ModuleType) -> None:
    """Add `OptimizerNames.DMUON` to the loaded module `transformers.training_args`; idempotent.

    Reason: enums cannot be extended in public. The member reduces to a plain `str`, so that `training_args.bin`
    opens where hf_muon was never imported.
    """
    names: Any = training_args.OptimizerNames
    if _MEMBER_NAME in names.__members__:
        return
    member = str.__new__(names, OPTIMIZER_NAME)
    member._name_, member._value_ = _MEMBER_NAME, OPTIMIZER_NAME
    member.__objclass__, member._sort_order_ = names, len(names.__members__)
    member.__reduce_ex__ = lambda protocol: (str, (OPTIMIZER_NAME,))
    type.__setattr__(names, _MEMBER_NAME, member)  # before the map: EnumType refuses to set known members
    names._member_names_.append(_MEMBER_NAME)
    names._member_map_[_MEMBER_NAME] = member
    names._value2member_map_[OPTIMIZER_NAME] = member


def add_optimizer_handler(trainer_optimizer: ModuleType, handler: Any) -> None:
    """Put `handler` for "dmuon" into the dispatch table of the loaded module `transformers.trainer_optimizer`.

    Reason: the table is private and `transformers.trainer` holds a second reference to it, so it is changed in place.
    """
    trainer_optimizer._OPTIMIZER_HANDLERS[trainer_optimizer.OptimizerNames(OPTIMIZER_NAME)] = handler


# ---------------------------------------------------------------- accelerate: how the job is set up


def accelerate_state() -> Any | None:
    """Return the process-wide `AcceleratorState`, or None where no Accelerator was made yet.

    Reason: the constructor raises when there is none, and a factory has no other way to the Accelerator that calls
    it. `_shared_state` is read because asking publicly would create a state.
    """
    import sys

    module = sys.modules.get("accelerate.state")  # not loaded: then no Accelerator exists
    if module is None or not module.AcceleratorState._shared_state:
        return None
    state = module.AcceleratorState()
    return state if hasattr(state, "distributed_type") else None


# ---------------------------------------------------------------- torch: autograd and FSDP2 (distributed)
# torch itself is imported inside the functions so that `import hf_muon` stays quick.


def in_backward() -> bool:
    """Tell whether autograd is running a backward on this thread.

    Needed to tell a recomputation (activation checkpointing) from a forward; FSDP2 asks the same private counter,
    and there is no public one.
    """
    import torch

    return torch._C._current_graph_task_id() != -1


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward that is running now ends. DDP and FSDP2 use the same; no public form exists."""
    import torch

    torch.autograd.Variable._execution_engine.queue_callback(callback)


def foreach_copy_(targets: list[Any], sources: list[Any]) -> None:
    """Copy many tensors in few kernels; the public `copy_` in a loop launches one each."""
    import torch

    if targets:
        torch._foreach_copy_(targets, sources)


def fsdp_precision(module: Any) -> tuple[Any, Any]:
    """Return (param_dtype, reduce_dtype) that `fully_shard` was given for `module`, (None, None) if not wrapped.

    The policy is public input of `fully_shard` but cannot be read back publicly.
    """
    state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
    policy = getattr(state, "_mp_policy", None)
    return (None, None) if policy is None else (policy.param_dtype, policy.reduce_dtype)


def without_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep torch.compile out of `function`; decorating at import time would import dynamo (a second)."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        import torch

        return torch._dynamo.disable(function, recursive=True)(*args, **kwargs)

    return wrapper
