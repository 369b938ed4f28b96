# SPDX-License-Identifier: Apache-2.0
"""Canaries: what hf-muon wraps in Accelerate and Trainer is still there and still used as we think."""

import inspect

import pytest
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from transformers import Trainer

from hf_muon import _compat


def test_prepare_calls_the_method_that_is_wrapped():
    parameters = list(inspect.signature(Accelerator._prepare_fsdp2).parameters.values())
    assert [p.kind for p in parameters] == [inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.VAR_POSITIONAL]
    assert "self._prepare_fsdp2(*args)" in inspect.getsource(Accelerator.prepare)


def test_the_optimizer_is_mapped_by_address():
    """Why the Muon groups are hidden: every optimizer parameter must be found in the sharded model."""
    source = inspect.getsource(inspect.unwrap(Accelerator._prepare_fsdp2))
    assert "data_ptr" in source and "fsdp2_switch_optimizer_parameters" in source


def test_a_prepared_optimizer_is_not_wrapped_again():
    import torch

    accelerator = Accelerator(cpu=True)
    optimizer = accelerator.prepare_optimizer(
        torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), device_placement=False
    )
    _compat.mark_prepared(optimizer)
    assert accelerator.prepare_optimizer(optimizer) is optimizer
    assert _compat.accelerator_optimizers(accelerator) == [optimizer]


@pytest.mark.parametrize(
    ("name", "first"),
    [("_load_from_checkpoint", "resume_from_checkpoint"), ("_load_optimizer_and_scheduler", "checkpoint")],
)
def test_trainer_loads_through_the_methods_that_are_wrapped(name, first):
    method = inspect.unwrap(getattr(Trainer, name))
    assert list(inspect.signature(method).parameters)[1] == first
    assert method.__name__ == name
    used_in = inspect.getsource(Trainer._prepare_for_training)
    assert f"self.{name}(" in used_in


def test_trainer_saves_the_model_before_it_looks_for_the_best_folder():
    source = inspect.getsource(Trainer._save_checkpoint)
    assert source.index("self.save_model(output_dir") < source.index("os.path.exists(best_checkpoint_dir)")


def test_the_plugin_has_the_fields_that_are_read():
    fields = FullyShardedDataParallelPlugin.__dataclass_fields__
    assert {"reshard_after_forward", "cpu_ram_efficient_loading", "cpu_offload", "state_dict_type"} <= set(fields)


def test_wrapping_twice_is_wrapping_once():
    class Owner:
        def method(self, value):
            return value

    def around(original, self, value):
        return original(self, value) + 1

    _compat._wrap_method(Owner, "method", around)
    _compat._wrap_method(Owner, "method", around)
    assert Owner().method(1) == 2
