# SPDX-License-Identifier: Apache-2.0
"""Canaries: the private torch names that the DMuon runtime uses still mean what it needs."""

import functools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from hf_muon import _compat
from hf_muon.distributed.owned import OwnedShard


def test_in_backward_is_true_only_inside_backward():
    seen = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(_compat.in_backward()))
    assert not _compat.in_backward()
    y.backward()
    assert seen == [True] and not _compat.in_backward()


def test_a_queued_callback_runs_when_backward_ends():
    events = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda grad: events.append("input"))
    y = x * 2
    y.register_hook(lambda grad: _compat.queue_backward_callback(functools.partial(events.append, "end")))
    y.backward()
    assert events == ["input", "end"]


def test_foreach_copy_copies():
    a, b = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.full((3,), 2.0)]
    _compat.foreach_copy_(a, b)
    _compat.foreach_copy_([], [])
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


def test_the_precision_policy_of_a_wrapped_module_can_be_read(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        module = torch.nn.Linear(2, 2)
        assert _compat.fsdp_precision(module) == (None, None)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
        assert _compat.fsdp_precision(module) == (torch.bfloat16, torch.float32)
    finally:
        dist.destroy_process_group()


def test_layout_questions_reach_the_owned_placement():
    """DCP and state-dict broadcasting compute a rank's part through this method of the placement."""
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    def layout(mesh, coordinate, *rows):
        placements = [OwnedShard(table) for table in rows]
        local, offset = _compute_local_shape_and_global_offset((7, 3), mesh, coordinate, placements)
        return tuple(local), offset[0]

    assert layout((2,), [0], (0, 7))[0] == (0, 3) and layout((2,), [1], (0, 7)) == ((7, 3), 0)
    parts = [layout((3,), [rank], (2, 0, 5)) for rank in range(3)]
    assert parts == [((2, 3), 0), ((0, 3), 7), ((5, 3), 2)]
    assert layout((2, 2), [1, 1], (3, 4), (1, 3)) == ((3, 3), 4)
    assert OwnedShard((0, 7)) != Shard(0) and OwnedShard((0, 7)) == OwnedShard((0, 7)) != OwnedShard((7, 0))


def test_without_dynamo_keeps_compile_out():
    calls = []

    @_compat.without_dynamo
    def hidden(x):
        calls.append(torch.compiler.is_compiling())
        return x

    torch.compile(lambda x: hidden(x + 1) * 2, backend="eager")(torch.ones(1))
    assert calls == [False]
