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


# ---------------------------------------------------------------- accelerate and Trainer: preparation, checkpoints


def wrap_prepare_fsdp2(around: Callable[..., Any]) -> None:
    """Make `Accelerator._prepare_fsdp2` call `around(original, accelerator, *args)`; once per process.

    Accelerate shards the model and re-maps the optimizer's parameters in this one private method. There is no public
    hook between or around the two, and Trainer gives an optimizer factory no way to its Accelerator, so the method is
    wrapped on the class.
    """
    from accelerate import Accelerator

    _wrap_method(Accelerator, "_prepare_fsdp2", around)


def wrap_load_state(around: Callable[..., Any]) -> None:
    """Make `Accelerator.load_state` call `around(original, accelerator, *args)` (public, wrapped in place).

    Its public load hook runs after weights and optimizer were read, too late to refuse a truncated file.
    """
    from accelerate import Accelerator

    _wrap_method(Accelerator, "load_state", around)


def wrap_trainer_loading(trainer_class: type, around: Callable[..., Any]) -> None:
    """Make Trainer's two private loaders of a checkpoint folder call `around(original, trainer, folder, *rest)`.

    Trainer outside FSDP refuses an FSDP2 checkpoint and looks for the optimizer under another name; nothing public
    runs between `train(resume_from_checkpoint=...)` and that refusal.
    """
    for name in ("_load_from_checkpoint", "_load_optimizer_and_scheduler"):
        _wrap_method(trainer_class, name, around)


def wrap_trainer_saving(trainer_class: type, around: Callable[..., Any]) -> None:
    """Make `Trainer.save_model` call `around(original, trainer, *args)` (a public method, wrapped in place)."""
    _wrap_method(trainer_class, "save_model", around)


def _wrap_method(owner: type, name: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    if getattr(original, "hf_muon_wrapper", False):
        return

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    wrapper.hf_muon_wrapper = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapper)


def mark_prepared(item: Any) -> None:
    """Tell Accelerate that `item` needs no wrapping of its own any more; it keeps this as a private attribute."""
    item._is_accelerate_prepared = True


def accelerator_optimizers(accelerator: Any) -> list[Any]:
    """Return the optimizers that an Accelerator has prepared; it offers no public list."""
    return list(accelerator._optimizers)
