# SPDX-License-Identifier: Apache-2.0
"""Version gates and every private upstream name that hf-muon touches, each with its reason.

Nothing else in the package may import a private name of torch, transformers or accelerate. Each entry says why
no public hook serves, and has a canary test in `tests/architecture` that fails when upstream changes.
"""

from __future__ import annotations

import logging
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
