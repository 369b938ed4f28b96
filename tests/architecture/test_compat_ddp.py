# SPDX-License-Identifier: Apache-2.0
"""Canaries: the private names behind owners under DDP still mean what they need."""

import torch
import torch.distributed as dist
from accelerate.accelerator import Accelerator
from torch.nn.parallel import DistributedDataParallel

import hf_muon
from hf_muon import _compat_ddp


class Marked(torch.Tensor):
    """A wrapper without memory that answers one operator."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return _compat_ddp.plain_torch_function(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return torch.tensor(3.0)


def test_a_wrapper_looks_like_its_parameter_and_results_stay_plain():
    parameter = torch.nn.Parameter(torch.ones(3, 2).T)
    wrapper = _compat_ddp.empty_wrapper(Marked, parameter)
    assert wrapper.shape == (2, 3) and wrapper.stride() == parameter.stride()
    assert wrapper.dtype == parameter.dtype and wrapper.device == parameter.device
    parameter.grad = wrapper
    assert parameter.grad is wrapper
    assert type(wrapper.norm()) is torch.Tensor and wrapper.norm() == 3.0


def test_what_ddp_keeps_to_itself(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(torch.nn.Linear(2, 2))
        assert not _compat_ddp.has_comm_hook(model)
        model.register_comm_hook(None, lambda state, bucket: None)
        assert _compat_ddp.has_comm_hook(model)
        assert not _compat_ddp.joins_uneven_inputs(model)
        with model.join():
            assert _compat_ddp.joins_uneven_inputs(model)
    finally:
        dist.destroy_process_group()


def test_accelerate_is_wrapped_once_where_hf_muon_is_imported():
    assert hf_muon.__version__
    for method in (Accelerator.prepare, Accelerator.save_state):
        assert method.hf_muon_wrapper and not hasattr(method.__wrapped__, "hf_muon_wrapper")
