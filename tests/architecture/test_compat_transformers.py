# SPDX-License-Identifier: Apache-2.0
"""Canaries: what `hf_muon._compat` relies on in transformers and accelerate still is as it was."""

import enum
import inspect

from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from transformers import Trainer, trainer, trainer_optimizer, training_args

from hf_muon import _compat
from hf_muon.integrations.transformers.registration import dmuon_handler


def test_the_optimizer_names_are_a_text_enum_with_the_three_tables_we_extend():
    names = training_args.OptimizerNames
    assert issubclass(names, str) and issubclass(names, enum.Enum)
    for table in (names._member_map_, names._value2member_map_):
        assert isinstance(table, dict)
    assert names._member_map_["DMUON"] is names._value2member_map_["dmuon"]
    assert names._member_names_.count("DMUON") == 1
    assert set(vars(names.SGD)) <= {*vars(names.DMUON)}  # a genuine member has nothing that ours lacks


def test_dispatch_is_one_dict_that_trainer_shares():
    assert trainer._OPTIMIZER_HANDLERS is trainer_optimizer._OPTIMIZER_HANDLERS
    assert trainer._OPTIMIZER_HANDLERS["dmuon"] is dmuon_handler
    assert trainer.OptimizerContext.__dataclass_fields__.keys() >= {"args", "optim_args"}


def test_trainer_calls_a_factory_with_the_model_and_options():
    assert trainer_optimizer.is_optimizer_factory(dmuon_handler)
    assert "optimizer_cls()(opt_model, **optimizer_kwargs)" in inspect.getsource(Trainer.create_optimizer)


def test_default_callbacks_run_before_those_of_trackers():
    source = inspect.getsource(Trainer.__init__)
    assert "DEFAULT_CALLBACKS + get_reporting_integration_callbacks" in source


def test_accelerate_state_is_none_until_there_is_one():
    AcceleratorState._reset_state(reset_partial_state=True)
    assert not AcceleratorState._shared_state
    assert _compat.accelerate_state() is None
    PartialState(cpu=True)
    assert _compat.accelerate_state() is None  # asking makes none
    Accelerator(cpu=True)
    assert str(_compat.accelerate_state().distributed_type).endswith("NO")
    AcceleratorState._reset_state(reset_partial_state=True)
