# SPDX-License-Identifier: Apache-2.0
"""What this version cannot train is refused in one sentence that names the way out."""

from types import SimpleNamespace

import pytest
import torch

import hf_muon
from hf_muon.integrations.transformers import backends
from tests.support.trainer_runs import tiny_llama


def pretend(monkeypatch, kind, **plugin):
    state = SimpleNamespace(distributed_type=f"DistributedType.{kind}", num_processes=2, fsdp_plugin=None)
    if plugin:
        state.fsdp_plugin = SimpleNamespace(**plugin)
    monkeypatch.setattr(backends, "accelerate_state", lambda: state)


@pytest.mark.parametrize(
    ("kind", "plugin", "message"),
    [
        ("FSDP", {"fsdp_version": 1}, '"fsdp_version": 2'),
    ],
)
def test_backends_of_later_versions_are_refused(monkeypatch, kind, plugin, message):
    pretend(monkeypatch, kind, **plugin)
    with pytest.raises(NotImplementedError, match=message):
        hf_muon.OptimizerFactory()(tiny_llama())


def test_tensor_parallel_and_load_time_sharding_are_refused(monkeypatch):
    model = tiny_llama()
    model._tp_size = 2
    with pytest.raises(NotImplementedError, match="Load it without tp_plan"):
        hf_muon.OptimizerFactory()(model)
    model._tp_size = None
    monkeypatch.setattr(type(model), "is_distributed_loading_by_transformers", True, raising=False)
    with pytest.raises(NotImplementedError, match="without distributed_config"):
        hf_muon.OptimizerFactory()(model)


def test_complex_parameters_are_refused_by_name():
    model = tiny_llama()
    model.phase = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.complex64))
    with pytest.raises(NotImplementedError, match=r"phase must be real; got torch\.complex64"):
        hf_muon.OptimizerFactory()(model)


def test_dedicated_owners_need_fsdp2(monkeypatch, caplog):
    backends._say_once.cache_clear()
    with caplog.at_level("INFO", "hf_muon"):
        hf_muon.OptimizerFactory()(tiny_llama(), dmuon="z3")
    assert "dmuon=z3 has no effect on one process: every matrix is whole here." in caplog.text
    pretend(monkeypatch, "MULTI_CPU")
    with pytest.raises(NotImplementedError, match="dmuon=z3 needs FSDP2; got DDP"):
        hf_muon.OptimizerFactory()(tiny_llama(), dmuon="z3")


@pytest.mark.parametrize(
    ("kind", "plugin", "expected"),
    [("FSDP", {"fsdp_version": 2}, "FSDP2"), ("MULTI_CPU", {}, "DDP"), ("MULTI_GPU", {}, "DDP")],
)
def test_replicated_and_fsdp2_models_are_accepted(monkeypatch, kind, plugin, expected):
    pretend(monkeypatch, kind, **plugin)
    model = tiny_llama()
    assert backends.detect_backend(model) is backends.Backend[expected]
    assert isinstance(hf_muon.OptimizerFactory()(model), hf_muon.MuonWithAuxAdam)
