# SPDX-License-Identifier: Apache-2.0
"""Version gates and every private upstream name that hf-muon touches, each with its reason.

Nothing else in the package may import a private name of torch, transformers or accelerate. Each entry says why
no public hook serves, and has a canary test in `tests/architecture` that fails when upstream changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


# ---------------------------------------------------------------------- accelerate and Trainer (integrations.accelerate)


def wrap_prepare_fsdp2(around: Callable[..., Any]) -> None:
    """Make `Accelerator._prepare_fsdp2` call `around(original, accelerator, *args)`; once per process.

    Accelerate shards the model and re-maps the optimizer's parameters in this one private method. There is no public
    hook between or around the two, and Trainer gives an optimizer factory no way to its Accelerator, so the method is
    wrapped on the class.
    """
    from accelerate import Accelerator

    _wrap_method(Accelerator, "_prepare_fsdp2", around)


def wrap_trainer_loading(around: Callable[..., Any]) -> None:
    """Make Trainer's two private loaders of a checkpoint folder call `around(original, trainer, folder, *rest)`.

    Trainer outside FSDP refuses an FSDP2 checkpoint and looks for the optimizer under another name; nothing public
    runs between `train(resume_from_checkpoint=...)` and that refusal.
    """
    from transformers import Trainer

    for name in ("_load_from_checkpoint", "_load_optimizer_and_scheduler"):
        _wrap_method(Trainer, name, around)


def wrap_trainer_saving(around: Callable[..., Any]) -> None:
    """Make `Trainer.save_model` call `around(original, trainer, *args)` (a public method, wrapped in place)."""
    from transformers import Trainer

    _wrap_method(Trainer, "save_model", around)


def _wrap_method(owner: type, name: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    if getattr(original, "hf_muon_wrapper", False):
        return

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    wrapper.hf_muon_wrapper = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapper)
