# SPDX-License-Identifier: Apache-2.0
"""Variants on CUDA: offloaded momentum on its own stream equals momentum on the device, bit for bit."""

import copy

import pytest
import torch

from hf_muon.optim import MuonWithAuxAdam
from hf_muon.optim.quantized import dequantize, quantize

pytestmark = pytest.mark.gpu


def run(offload, **options):
    torch.manual_seed(0)
    # Two shapes are two batches: the second is fetched beside the products of the first.
    shapes = [(1024, 512)] * 6 + [(512, 2048)] * 4 + [(64,)]
    params = [torch.nn.Parameter(torch.randn(shape, device="cuda")) for shape in shapes]
    groups = [{"params": params[:-1], "use_muon": True}, {"params": params[-1:], "use_muon": False}]
    optimizer = MuonWithAuxAdam(groups, lr=0.01, offload=offload, ns_dtype="float32", **options)
    for step in range(4):
        generator = torch.Generator(device="cuda").manual_seed(step)
        for param in params:
            param.grad = torch.randn(param.shape, device="cuda", generator=generator)
        optimizer.step()
        if step == 1:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    saved = optimizer.state_dict()["state"]
    return [param.detach().cpu() for param in params], [state.get("momentum_buffer") for state in saved.values()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offload_on_a_stream_is_bit_for_bit_no_offload(dtype):
    here, momenta = run("none", momentum_dtype=dtype)
    there, resting = run("cpu", momentum_dtype=dtype)
    assert all(map(torch.equal, here, there))
    for one, other in zip(momenta[:-1], resting[:-1], strict=True):
        assert one.is_cuda and not other.is_cuda and other.is_pinned()
        assert torch.equal(one.cpu(), other)


def test_int8_momentum_offloads_to_the_same_bits_and_its_codes_are_those_of_the_cpu():
    here, momenta = run("none", momentum_dtype="int8")
    there, resting = run("cpu", momentum_dtype="int8")
    assert all(map(torch.equal, here, there))
    assert all(torch.equal(one.cpu(), other) for one, other in zip(momenta[:-1], resting[:-1], strict=True))
    codes, scales = quantize(torch.randn(3, 70, 100, device="cuda"))
    values = dequantize(codes, scales)
    for again, their in (quantize(values), quantize(values.cpu())):
        assert torch.equal(again.cpu(), codes.cpu()) and torch.equal(their.cpu(), scales.cpu())
