# SPDX-License-Identifier: Apache-2.0
"""What hf-muon relies on inside DeepSpeed; a failure here means that DeepSpeed changed."""

import ast
import inspect

import pytest

from tests.support import cpu_deepspeed


def sources():
    """Source of the classes whose attributes are read, without importing DeepSpeed into this process."""
    import importlib.util
    from pathlib import Path

    root = Path(importlib.util.find_spec("deepspeed").origin).parent
    return {
        name: (root / "runtime" / name).read_text()
        for name in ("engine.py", "zero/stage_1_and_2.py", "zero/stage3.py")
    }


def assigned(source):
    """Names that a file assigns on `self`."""
    return {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }


def test_the_engine_has_the_method_that_is_wrapped():
    functions = {n.name: n for n in ast.walk(ast.parse(sources()["engine.py"])) if isinstance(n, ast.FunctionDef)}
    arguments = [argument.arg for argument in functions["_configure_optimizer"].args.args]
    assert arguments == ["self", "client_optimizer", "model_parameters"]
    assert {"has_moe_layers", "seq_data_parallel_group", "global_steps", "skipped_steps", "global_rank", "device"} <= (
        assigned(sources()["engine.py"])
    )


def test_the_partitions_have_the_names_that_are_read():
    names = {"round_robin_bit16_groups", "single_partition_of_fp32_groups", "real_dp_process_group", "partition_size"}
    names |= {"param_to_partition_ids", "grad_partition_insertion_offset", "grad_start_offset", "overflow"}
    assert names <= assigned(sources()["zero/stage_1_and_2.py"])
    assert "def get_param_id(" in sources()["zero/stage_1_and_2.py"]
    names = {"fp16_groups", "fp32_partitioned_groups_flat", "sub_group_to_group_id", "overflow"}
    names |= {"sub_group_process_groups", "sub_group_partition_counts"}
    assert names <= assigned(sources()["zero/stage3.py"])


def test_the_name_of_the_class_still_decides_whose_newton_schulz_runs():
    """ZeRO 1 and 2 look for "muon" in the class name; `PartitionedOptimizer` must not have it in its name."""
    from hf_muon.integrations.deepspeed.optimizer import PartitionedOptimizer

    assert "'muon' in self.optimizer.__class__.__name__.lower()" in sources()["zero/stage_1_and_2.py"]
    assert "muon" not in PartitionedOptimizer.__name__.lower()


def names_of_wrapped():
    import deepspeed.runtime.engine as engine
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    import hf_muon  # noqa: F401

    method = engine.DeepSpeedEngine._configure_optimizer
    parameters = list(inspect.signature(split_params_into_different_moe_groups_for_optimizer).parameters)
    return getattr(method, "hf_muon_wrapper", False), isinstance(ZERO_SUPPORTED_OPTIMIZERS, list), parameters[0]


@pytest.mark.slow
def test_importing_both_connects_them():
    assert cpu_deepspeed.run(names_of_wrapped) == [(True, True, "param_groups")] * 2
