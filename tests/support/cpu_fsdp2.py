# SPDX-License-Identifier: Apache-2.0
"""Test-only switch: stock Accelerate selects FSDP2 for several GPUs only; this does so for CPU processes too."""

import contextlib
import os

from accelerate import state
from accelerate.utils import DistributedType

_original_init = state.AcceleratorState.__init__


def _init(self, *args, fsdp_plugin=None, **kwargs):
    _original_init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.FSDP
        state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        if self._mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self._mixed_precision)
        self.fsdp_plugin = fsdp_plugin


def enable():
    """Switch it on for this process (idempotent)."""
    state.AcceleratorState.__init__ = _init


@contextlib.contextmanager
def fresh_accelerate(**environment):
    """Give the block Accelerate's singletons anew, and take every variable it leaves behind away afterwards."""
    before = dict(os.environ)
    os.environ.update(environment)
    state.AcceleratorState._reset_state(True)
    state.GradientState._reset_state()
    try:
        yield
    finally:
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
