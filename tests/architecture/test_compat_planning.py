# SPDX-License-Identifier: Apache-2.0
"""Canaries: torch's memory tracker, fake tensors and fake process group still do what the prediction needs."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hf_muon import _compat_planning as compat
from hf_muon.planning.allocations import AllocationCounter


def test_a_timeline_counts_parts_peaks_and_resized_storages():
    with compat.fake_process_group(4, 1):
        assert dist.get_rank() == 1 and dist.get_world_size() == 4
        mesh = init_device_mesh("cpu", (4,))
        with compat.fake_mode():
            model = fully_shard(nn.Linear(8, 8, bias=False), mesh=mesh)
            timeline = compat.MemoryTimeline(model)
            extra, buffer = torch.zeros(25), torch.empty(50)
            buffer.untyped_storage().resize_(0)
            timeline.track("states", extra)
            timeline.track("gathered", buffer)
            with timeline:
                before = timeline.current()
                assert before["weights"] == 8 * 8 * 4 // 4
                assert before["states"] == 100 and before["gathered"] == 0
                buffer.untyped_storage().resize_(200)
                assert timeline.current()["gathered"] == 200
                buffer.untyped_storage().resize_(0)
                timeline.restart_peak()
                model(torch.zeros(2, 8)).sum().backward()
                assert timeline.current()["gradients"] == 8 * 8 * 4 // 4
                peak = timeline.peak()
                assert peak["gathered"] >= 8 * 8 * 4
                timeline.restart_peak()
                with timeline.optimizer_step():
                    temporary = torch.zeros(1000)
                assert timeline.peak()["states"] == 100 + temporary.numel() * 4
    assert not dist.is_initialized()


def test_a_second_process_group_is_refused():
    with (
        compat.fake_process_group(2, 0),
        pytest.raises(RuntimeError, match="must run outside of a process group"),
        compat.fake_process_group(2, 0),
    ):
        pass


def test_meta_tensors_are_counted_while_they_live():
    def work():
        first = torch.empty(100, device="meta")
        second = first + 1
        del first
        return second * 2

    with AllocationCounter() as allocations:
        work()
    assert allocations.peak == 800


def test_the_classes_that_are_wrapped_can_be_asked_for():
    from transformers import AutoModelForCausalLM, LlamaConfig

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=1, vocab_size=8))
    assert compat.wrapped_classes(model) == {"LlamaDecoderLayer"}
    assert compat.wrapped_classes(nn.Linear(1, 1)) == frozenset()
