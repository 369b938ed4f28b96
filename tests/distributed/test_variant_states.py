# SPDX-License-Identifier: Apache-2.0
"""The plan's bytes of optimizer state per rank, times two, against what two owners hold together."""

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hf_muon
from hf_muon.optim.tensor_layout import local_tensor
from hf_muon.planning.variants import VARIANTS as ALL
from tests.support.trainer_runs import tiny_llama
from tests.support.worker_pool import run_on_ranks

# One of each kind of entry and place of rest; dtypes are compared in one process.
VARIANTS = {label: ALL[label] for label in ("muon", "normuon=true", "momentum_dtype=int8, offload=cpu")}


def held():
    """Bytes of this rank's state by variant, on the device and momentum alone."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    found = {}
    for label, variant in VARIANTS.items():
        model = tiny_llama(3).to(variant.weights)
        hf_muon.tag_parameters(model)
        with hf_muon.dedicate_params(model, mesh):
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        optimizer = hf_muon.MuonWithAuxAdam(model.named_parameters(), lr=1e-3, **variant.options)
        sizes = {"all": 0, "momentum": 0}
        for state in optimizer.state.values():
            for key, value in state.items():
                local = local_tensor(value)
                sizes["all"] += local.numel() * local.element_size()
                sizes["momentum"] += key.startswith("momentum") * local.numel() * local.element_size()
        found[label] = sizes
    return found


def test_two_owners_hold_together_what_the_plan_says():
    plan = hf_muon.plan(tiny_llama(3), world_size=2).to_dict()["variants"]
    first, second = run_on_ranks(2, held)
    for label, variant in VARIANTS.items():
        row = plan[label]
        both = {key: first[label][key] + second[label][key] for key in ("all", "momentum")}
        assert first[label]["momentum"] and second[label]["momentum"]
        assert 2 * (row["device_bytes_per_rank"] + row["host_bytes_per_rank"]) == pytest.approx(both["all"], rel=1e-12)
        on_host = both["momentum"] if variant.options.get("offload") == "cpu" else 0
        assert 2 * row["host_bytes_per_rank"] == pytest.approx(on_host, rel=1e-12)
