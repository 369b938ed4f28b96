# SPDX-License-Identifier: Apache-2.0
"""MuonClip on transformers models: what is measured, what is rescaled, what is refused."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

import hf_muon
from hf_muon.integrations.transformers import attention_logits
from hf_muon.integrations.transformers.attention_logits import largest_logits
from tests.support.tiny_models import tiny_config
from tests.support.trainer_runs import make_trainer, plain_optimizer, tiny_llama, token_rows

THRESHOLD = 20.0


def brute_force(query, key, scaling, mask=None, causal=False):
    """Largest logit per head in float64 from the whole matrix of logits."""
    heads, length, keys = query.shape[1], query.shape[2], key.shape[2]
    repeated = key.double().repeat_interleave(heads // key.shape[1], dim=1)
    logits = torch.einsum("bhid,bhjd->bhij", query.double(), repeated) * scaling
    if causal:
        logits = logits.masked_fill(~torch.ones(length, keys, dtype=torch.bool).tril(keys - length), -math.inf)
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf)
    return logits.amax(dim=(0, 2, 3))


@pytest.mark.parametrize("chunk_bytes", [1, 700, 2**26])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_largest_logits_equal_the_whole_matrix(monkeypatch, kv_heads, chunk_bytes) -> None:
    monkeypatch.setattr(attention_logits, "CHUNK_BYTES", chunk_bytes)
    query, key = torch.randn(3, 4, 9, 8), torch.randn(3, kv_heads, 13, 8)
    mask = torch.rand(3, 1, 9, 13) < 0.6
    additive = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    for given, wanted, causal in (
        (None, None, False),
        (None, None, True),
        (mask, mask, False),
        (additive, mask, False),
    ):
        ours = largest_logits(query, key, 0.3, given, causal)
        torch.testing.assert_close(ours.double(), brute_force(query, key, 0.3, wanted, causal), rtol=1e-5, atol=1e-5)
    one_row = torch.rand(1, 1, 1, 13) < 0.5
    ours = largest_logits(query, key, 0.3, one_row, False)
    wanted = brute_force(query, key, 0.3, one_row.expand(3, 1, 9, 13))
    torch.testing.assert_close(ours.double(), wanted, rtol=1e-5, atol=1e-5)


def clipped(before):
    """Heads come one percent below the threshold, those that are there stay."""
    return before.clamp(max=0.99 * THRESHOLD)


def exploding(model_type="llama", how="eager", factor=60.0, **overrides):
    """A tiny model whose query and key projections were scaled until logits are in the hundreds."""
    torch.manual_seed(3)
    config = tiny_config(model_type, **overrides)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=how).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(leaf in name for leaf in ("q_proj", "k_proj", "q_b_proj", "kv_b_proj", "kv_a_proj")):
                parameter.mul_(factor)
    return model


def step(model, optimizer, ids):
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def measured(monkeypatch, model, ids):
    """Largest logit per layer and head in float64, from the queries and keys that eager attention is given."""
    found = {}
    original = modeling_llama.eager_attention_forward

    def watched(module, query, key, value, attention_mask, scaling, **options):
        found[module.layer_idx] = brute_force(query, key, scaling, attention_mask > -1)
        return original(module, query, key, value, attention_mask, scaling, **options)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(modeling_llama, "eager_attention_forward", watched)
        patch.setattr(model.config, "_attn_implementation_internal", "eager")
        model(input_ids=ids)
    return torch.stack([found[layer] for layer in sorted(found)])


@pytest.mark.parametrize("how", ["eager", "sdpa"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_every_head_above_the_threshold_comes_under_it_and_no_other_moves(monkeypatch, kv_heads, how) -> None:
    """One layer, so that what it attends to does not change; the weights of the step itself move by nothing."""
    model = exploding(how=how, num_key_value_heads=kv_heads, num_hidden_layers=1)
    ids = torch.randint(0, 64, (2, 24))
    before = measured(monkeypatch, model, ids)
    assert float(before.max()) > 3 * THRESHOLD
    free = copy.deepcopy(model)
    step(model, hf_muon.OptimizerFactory()(model, lr=0.0, qk_clip=THRESHOLD), ids)
    step(free, hf_muon.OptimizerFactory()(free, lr=0.0), ids)
    after = measured(monkeypatch, model, ids)
    # Every head by its own factor, up to fp32 rounding.
    torch.testing.assert_close(after, clipped(before), rtol=1e-5, atol=1e-5)
    assert torch.equal(measured(monkeypatch, free, ids), before)


@pytest.mark.parametrize(("layers", "steps"), [(1, 1), (3, 4)])
def test_an_exploding_model_is_under_the_threshold_after_the_step_and_not_without(monkeypatch, layers, steps) -> None:
    """Clipping one layer changes what the next attends to: with three layers the last is there some steps later."""
    ids = torch.randint(0, 64, (2, 24))
    largest = {}
    for threshold in (THRESHOLD, None):
        model = exploding(num_hidden_layers=layers)
        optimizer = hf_muon.OptimizerFactory()(model, lr=1e-4, qk_clip=threshold)
        for _ in range(steps):
            step(model, optimizer, ids)
        largest[threshold] = float(measured(monkeypatch, model, ids).max())
    assert largest[THRESHOLD] <= THRESHOLD
    assert largest[None] > 3 * THRESHOLD


@pytest.mark.parametrize("how", ["eager", "sdpa"])
def test_nothing_changes_under_the_threshold(how) -> None:
    ids = torch.randint(0, 64, (2, 24))
    results = []
    for threshold in (1e4, None):
        model = exploding(how=how)
        optimizer = hf_muon.OptimizerFactory()(model, lr=1e-3, qk_clip=threshold)
        for _ in range(2):
            step(model, optimizer, ids)
        results.append(model.state_dict())
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize("q_lora_rank", [24, None])
def test_latent_attention_scales_by_parts_and_leaves_the_shared_rotary_keys(q_lora_rank) -> None:
    """The largest logit of each head, from the model itself before and after; the rows of values stay."""
    model = exploding("deepseek_v3", "sdpa", 40.0, num_hidden_layers=1, q_lora_rank=q_lora_rank)
    ids = torch.randint(0, 64, (2, 24))
    seen = []
    original = attention_logits.largest_logits

    def watched(query, key, scaling, mask, causal):
        seen.append(brute_force(query, key, scaling, None, causal=True))
        return original(query, key, scaling, mask, causal)

    attention_logits.largest_logits = watched
    try:
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer = hf_muon.OptimizerFactory()(model, lr=0.0, qk_clip=THRESHOLD)
        step(model, optimizer, ids)
        model(input_ids=ids)
    finally:
        attention_logits.largest_logits = original
    assert float(seen[0].max()) > THRESHOLD
    torch.testing.assert_close(seen[1], clipped(seen[0]), rtol=1e-5, atol=1e-5)
    attention = model.model.layers[0].self_attn
    values = attention.kv_b_proj.weight.view(4, attention.qk_nope_head_dim + attention.v_head_dim, -1)
    old = before["model.layers.0.self_attn.kv_b_proj.weight"].view_as(values)
    assert torch.equal(values[:, attention.qk_nope_head_dim :], old[:, attention.qk_nope_head_dim :])
    shared = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    assert torch.equal(attention.kv_a_proj_with_mqa.weight, before[shared])


def test_biases_of_queries_and_keys_are_scaled_too(monkeypatch) -> None:
    model = exploding(num_hidden_layers=1, attention_bias=True)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.bias.normal_()
        model.model.layers[0].self_attn.k_proj.bias.normal_()
    ids = torch.randint(0, 64, (2, 24))
    before = measured(monkeypatch, model, ids)
    step(model, hf_muon.OptimizerFactory()(model, lr=0.0, qk_clip=THRESHOLD), ids)
    after = measured(monkeypatch, model, ids)
    torch.testing.assert_close(after, clipped(before), rtol=1e-5, atol=1e-5)


def test_accumulation_counts_every_micro_batch_and_evaluation_none(monkeypatch) -> None:
    model = exploding(num_hidden_layers=1)
    small, large = torch.randint(0, 64, (1, 2)), torch.randint(0, 64, (8, 32))
    wanted = measured(monkeypatch, model, large)
    optimizer = hf_muon.OptimizerFactory()(model, lr=0.0, qk_clip=THRESHOLD)
    for ids in (large, small):
        model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    assert math.isclose(float(optimizer.qk_clip.largest), float(wanted.max()), rel_tol=1e-5)
    with torch.no_grad():
        model.eval()(input_ids=large)
    with pytest.raises(RuntimeError, match="qk_clip must see the attention of the model; got no call"):
        optimizer.step()


def test_a_skipped_step_and_infinite_logits_change_nothing() -> None:
    model = exploding(num_hidden_layers=1)
    optimizer = hf_muon.OptimizerFactory()(model, lr=0.0, qk_clip=THRESHOLD)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ids = torch.randint(0, 64, (2, 8))
    model(input_ids=ids, labels=ids).loss.backward()
    model.lm_head.weight.grad[0, 0] = math.nan
    optimizer.step()
    assert optimizer.last_step_skipped
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    optimizer.zero_grad()
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[0, 0] = math.inf
    weight = model.model.layers[0].self_attn.k_proj.weight.detach().clone()
    model(input_ids=ids)
    optimizer.step()
    assert torch.equal(model.model.layers[0].self_attn.k_proj.weight, weight)


@pytest.mark.parametrize(
    ("model_type", "sentence"),
    [
        ("qwen3", "self_attn must not normalise queries and keys for qk_clip; got q_norm and k_norm"),
        ("gpt2", "qk_clip must find separate query and key projections"),
    ],
)
def test_models_that_cannot_be_rescaled_are_refused(model_type, sentence) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config(model_type))
    with pytest.raises(NotImplementedError, match=sentence):
        hf_muon.OptimizerFactory()(model, lr=0.1, qk_clip=100)


def test_frozen_projections_and_other_attention_functions_are_refused() -> None:
    model = tiny_llama()
    model.model.layers[1].self_attn.k_proj.weight.requires_grad_(False)
    with pytest.raises(NotImplementedError, match=r"layers\.1\.self_attn\.k_proj\.weight must be trained for qk_clip"):
        hf_muon.OptimizerFactory()(model, lr=0.1, qk_clip=100)

    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("strange", lambda *args, **options: sdpa_attention_forward(*args, **options))
    model = tiny_llama(attn_implementation="strange").train()
    hf_muon.OptimizerFactory()(model, lr=0.1)
    optimizer = hf_muon.OptimizerFactory()(model, lr=0.1, qk_clip=100)
    with pytest.raises(NotImplementedError, match=r"must use eager or sdpa attention for qk_clip; got strange"):
        model(input_ids=torch.zeros(1, 4, dtype=torch.long))
    del optimizer  # nobody listens any more
    model(input_ids=torch.zeros(1, 4, dtype=torch.long))


def test_an_optimizer_that_never_saw_the_model_says_so() -> None:
    model = tiny_llama()
    hf_muon.tag_parameters(model)
    optimizer = hf_muon.MuonWithAuxAdam(model.named_parameters(), lr=0.1, qk_clip=100)
    model(input_ids=torch.zeros(1, 4, dtype=torch.long)).logits.sum().backward()
    with pytest.raises(RuntimeError, match=r"Build it by hf_muon.OptimizerFactory, or call attach_qk_clip"):
        optimizer.step()


def test_trainer_clips_and_logs_diagnostics(tmp_path) -> None:
    model = exploding(how="sdpa", num_key_value_heads=4)
    options = "ns_dtype=float32,qk_clip=20,diagnostics=2,muon_lr=1e-4,adam_lr=1e-4"
    trainer = make_trainer(tmp_path, token_rows(16), model, optim_args=options, max_steps=4)
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "learning_rate" in entry]
    found = [entry["step"] for entry in entries if "diag_stable_rank" in entry]
    assert found == [2, 4]
    last = entries[-1]
    # Other rows than those of the clip before, and layers that see other inputs: near the threshold, not at it.
    assert 0 < last["diag_max_attention_logit"] < 40 < entries[1]["diag_max_attention_logit"] * 40
    assert last["diag_update_rms_group0"] == pytest.approx(last["muon_update_rms"], rel=1e-6)
    assert last["diag_update_rms_group1"] > 0
    assert 0 < last["diag_orthogonality_error"] < 1
    assert 1 <= last["diag_stable_rank"] <= 32
    assert plain_optimizer(trainer).diagnostics() == {}
