# SPDX-License-Identifier: Apache-2.0
"""Makes `TrainingArguments(optim="dmuon")` known to transformers, when and only when transformers is loaded."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

from ... import _compat

logger = logging.getLogger("hf_muon.integrations.transformers")

_lock = threading.Lock()
_registered = False


def register() -> None:
    """Register the optimizer name, its handler and the log callback with transformers; idempotent.

    `import hf_muon` calls it. Nothing is imported: each part is done when transformers' own module is loaded, at
    once where it already is.
    """
    global _registered
    with _lock:
        if _registered:
            return
        _registered = True
    for module_name, action in _ACTIONS.items():
        wrapt.register_post_import_hook(_guarded(action), module_name)


def dmuon_handler(context: Any) -> tuple[Any, dict[str, Any]]:
    """Return the factory and its typed options for one Trainer; transformers calls it for `optim="dmuon"`.

    Args:
        context: transformers' `OptimizerContext`.

    Raises:
        ValueError, TypeError, NotImplementedError: an option in `optim_args` is unknown, wrong or unavailable.
    """
    from .factory import OptimizerFactory
    from .trainer_options import options_from_arguments

    return OptimizerFactory, options_from_arguments(context.args, context.optim_args)


def _add_name(module: ModuleType) -> None:
    _compat.add_optimizer_name(module)


def _add_handler(module: ModuleType) -> None:
    _compat.add_optimizer_handler(module, dmuon_handler)


def _add_callback(module: ModuleType) -> None:
    from .callback import MuonCallback

    # In place: before the callbacks of trackers, which then see the values that ours adds.
    if MuonCallback not in module.DEFAULT_CALLBACKS:
        module.DEFAULT_CALLBACKS.append(MuonCallback)


def _connect_checkpoints(module: ModuleType) -> None:
    from ..accelerate import activate_trainer

    activate_trainer(module.Trainer)


def _connect_data_parallel(module: ModuleType) -> None:
    from ..accelerate import activate_data_parallel

    activate_data_parallel()


def _connect_deepspeed(module: ModuleType) -> None:
    from ..deepspeed.engine import connect_engine

    connect_engine(module)


def _both(*actions: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def run(module: ModuleType) -> None:
        for action in actions:
            action(module)

    return run


def _guarded(action: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    """Return a hook that never breaks the import of transformers itself."""

    def hook(module: ModuleType) -> None:
        try:
            action(module)
        except Exception as error:
            logger.warning(
                'optim="dmuon" could not be registered with this version of transformers (%s: %s). '
                "Use Trainer(optimizer_cls_and_kwargs=(hf_muon.OptimizerFactory, {...})).",
                type(error).__name__,
                error,
            )

    return hook


_ACTIONS: dict[str, Callable[[ModuleType], None]] = {
    "transformers.training_args": _add_name,
    "transformers.trainer_optimizer": _add_handler,
    "transformers.trainer": _both(_add_callback, _connect_checkpoints),
    "accelerate.accelerator": _connect_data_parallel,
    "deepspeed.runtime.engine": _connect_deepspeed,
}
