# SPDX-License-Identifier: Apache-2.0
"""Canaries of the hook into transformers' attention interface: they fail when its shape changes."""

import inspect

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
from transformers.models.llama.modeling_llama import eager_attention_forward

from hf_muon._compat_attention import observe_attention
from tests.support.trainer_runs import tiny_llama


def test_models_ask_the_interface_in_every_forward():
    assert list(inspect.signature(AttentionInterface.get_interface).parameters) == [
        "self",
        "attn_implementation",
        "default",
    ]
    for function in (eager_attention_forward, sdpa_attention_forward):
        names = list(inspect.signature(function).parameters)
        assert names[:5] == ["module", "query", "key", "value", "attention_mask"]
        assert "scaling" in names


def test_an_observer_sees_every_layer_and_leaves_no_trace():
    model, calls = tiny_llama(attn_implementation="eager"), []
    ids = torch.zeros(1, 4, dtype=torch.long)
    before = model(input_ids=ids).logits
    end = observe_attention(lambda how, module, query, key, mask, options: calls.append((how, module.layer_idx)))
    try:
        assert torch.equal(model(input_ids=ids).logits, before)
    finally:
        end()
    assert calls == [("eager", 0), ("eager", 1)]
    model(input_ids=ids)
    assert len(calls) == 2
    assert ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", eager_attention_forward) is sdpa_attention_forward
    end()
