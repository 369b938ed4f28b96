# SPDX-License-Identifier: Apache-2.0
"""What the paper's rule bounds, layer by layer on the inputs it saw, and what `qk_clip_exact` bounds: every logit."""

from __future__ import annotations

import contextlib
import copy
import math

import pytest
import torch
from transformers import AutoModel

import hf_muon
from hf_muon._compat_attention import observe_attention
from tests.integration.transformers.test_qk_clip import THRESHOLD, brute_force, clipped, exploding, step
from tests.support.tiny_models import tiny_config
from tests.support.trainer_runs import make_trainer, token_rows

AT_OR_UNDER = 0.99 * THRESHOLD * (1 + 1e-5)  # the aim, up to float32 rounding of scaled weights


@contextlib.contextmanager
def watching(causal=True):
    """Collect, per call of attention, the largest logit of each head in float64; no padding."""
    found = []

    def look(how, module, query, key, mask, options):
        found.append(brute_force(query.detach(), key.detach(), options["scaling"], causal=causal))

    end = observe_attention(look)
    try:
        yield found
    finally:
        end()


def largest(model, ids, causal=True):
    """(calls, heads): the largest logits of an evaluation on `ids`."""
    training = model.training
    with torch.no_grad(), watching(causal) as found:
        model.eval()(input_ids=ids)
    model.train(training)
    return torch.stack(found)


def tokens(rows=2, length=24):
    return torch.randint(0, 64, (rows, length))


def stepped(model, ids, lr=1e-2, **options):
    """A copy of `model` after one step on `ids`."""
    model = copy.deepcopy(model)
    step(model, hf_muon.OptimizerFactory()(model, lr=lr, ns_dtype="float32", **options), ids)
    return model


def inputs_of_attention(model, ids):
    """What each attention module is called with in a training pass."""
    calls = []
    handles = [
        layer.self_attn.register_forward_pre_hook(lambda m, args, options: calls.append(options), with_kwargs=True)
        for layer in model.model.layers
    ]
    model(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return calls


def logits_on(model, calls):
    """The largest logits of each attention module on recorded inputs."""
    with torch.no_grad(), watching() as found:
        for layer, call in zip(model.model.layers, calls, strict=True):
            layer.self_attn(**call)
    return torch.stack(found)


@pytest.mark.parametrize("layers", [1, 4])
def test_the_papers_rule_scales_the_updated_weights_by_what_was_measured_before(layers) -> None:
    """On the inputs that each layer had, so the update itself adds less than the room of one percent."""
    model, ids = exploding(num_hidden_layers=layers), tokens()
    calls = inputs_of_attention(model, ids)
    before = logits_on(model, calls)
    assert float(before.min(dim=1).values.max()) > THRESHOLD
    gamma = clipped(before) / before
    for lr in (0.0, 1e-2):
        after = logits_on(stepped(model, ids, lr, qk_clip=THRESHOLD), calls)
        free = logits_on(stepped(model, ids, lr), calls)
        torch.testing.assert_close(after, gamma * free, rtol=1e-4, atol=1e-4)
        assert torch.equal(free, before) == (lr == 0.0)
        assert float(after.max()) <= (AT_OR_UNDER if lr == 0.0 else THRESHOLD)


@pytest.mark.parametrize(
    ("kind", "how", "layers"),
    [("llama", "sdpa", 1), ("llama", "eager", 2), ("llama", "sdpa", 4), ("deepseek_v3", "sdpa", 2)],
)
def test_with_exact_no_logit_is_above_after_the_step_however_many_layers(kind, how, layers) -> None:
    model, ids = exploding(kind, how, num_hidden_layers=layers), tokens()
    assert float(largest(model, ids).max()) > 3 * THRESHOLD
    exact = largest(stepped(model, ids, qk_clip=THRESHOLD, qk_clip_exact=True), ids)
    assert float(exact.max()) <= AT_OR_UNDER
    assert float(exact.max()) > 0.98 * THRESHOLD  # and not lower than asked
    # The rule of the paper ends above: embeddings, norms and earlier layers moved, so the inputs are others.
    assert float(largest(stepped(model, ids, qk_clip=THRESHOLD), ids).max()) > 1.02 * THRESHOLD
    assert float(largest(stepped(model, ids), ids).max()) > 3 * THRESHOLD


def test_exact_under_the_threshold_changes_no_bit_and_draws_no_random_number() -> None:
    torch.manual_seed(1)
    base, ids = exploding(attention_dropout=0.3), tokens()
    base.model.layers[0].eval()  # as a user freezes a part
    results = []
    for options in ({"qk_clip": 1e4, "qk_clip_exact": True}, {}):
        model = copy.deepcopy(base)
        optimizer = hf_muon.OptimizerFactory()(model, lr=1e-3, **options)
        torch.manual_seed(2)
        for _ in range(2):
            step(model, optimizer, ids)
        assert [m.training for m in model.modules()] == [m.training for m in base.modules()]
        results.append((model.state_dict(), torch.random.get_rng_state()))
    assert torch.equal(results[0][1], results[1][1])
    assert all(torch.equal(value, results[1][0][name]) for name, value in results[0][0].items())


def test_exact_settles_every_micro_batch_of_a_step() -> None:
    model = exploding(num_hidden_layers=2)
    batches = [tokens(2, 8), tokens(4, 20), tokens(1, 24)]
    optimizer = hf_muon.OptimizerFactory()(model, lr=1e-2, qk_clip=THRESHOLD, qk_clip_exact=True, ns_dtype="float32")
    for ids in batches:
        model(input_ids=ids, labels=ids).loss.backward()
    with torch.no_grad():
        model(input_ids=tokens(8, 32))  # without gradients: not one of the step's
    optimizer.step()
    found = [float(largest(model, ids).max()) for ids in batches]
    assert max(found) <= AT_OR_UNDER
    assert max(found) > 0.9 * THRESHOLD


def test_exact_on_a_module_that_runs_twice() -> None:
    """ALBERT repeats one layer: its last call sees inputs that an earlier factor has not shaped yet."""
    torch.manual_seed(3)
    model = AutoModel.from_config(tiny_config("albert", num_hidden_layers=3)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "query" in name or "key" in name:
                parameter.mul_(60.0)
    ids = tokens()
    assert float(largest(model, ids, causal=False).max()) > 2 * THRESHOLD
    optimizer = hf_muon.OptimizerFactory()(model, lr=1e-3, qk_clip=THRESHOLD, qk_clip_exact=True, ns_dtype="float32")
    model(input_ids=ids)[0].square().mean().backward()
    optimizer.step()
    found = largest(model, ids, causal=False)
    assert len(found) == 3 and float(found.max()) <= THRESHOLD


def test_exact_repeats_the_pass_under_the_autocast_it_ran_in() -> None:
    model, ids, dtypes = exploding(num_hidden_layers=1), tokens(1, 8), []
    optimizer = hf_muon.OptimizerFactory()(model, lr=1e-3, qk_clip=THRESHOLD, qk_clip_exact=True, ns_dtype="float32")
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=ids, labels=ids).loss.backward()
    projection = model.model.layers[0].self_attn.q_proj
    projection.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    optimizer.step()
    assert dtypes == [torch.bfloat16]
    with torch.autocast("cpu", torch.bfloat16):
        assert float(largest(model, ids).max()) <= THRESHOLD  # 1 % of room; bfloat16 rounds queries and keys by 0.4 %


def test_exact_needs_calls_of_the_model_itself_and_a_threshold() -> None:
    model, ids = exploding(num_hidden_layers=1), tokens(1, 8)
    optimizer = hf_muon.OptimizerFactory()(model, lr=1e-3, qk_clip=THRESHOLD, qk_clip_exact=True)
    before = copy.deepcopy(model.state_dict())
    model.model(input_ids=ids).last_hidden_state.sum().backward()
    with pytest.raises(RuntimeError, match="qk_clip_exact must repeat the forward of the model"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match="qk_clip_exact must come with a threshold; got none"):
        hf_muon.MuonConfig(qk_clip_exact=True)


def test_a_skipped_step_repeats_nothing() -> None:
    model, ids = exploding(num_hidden_layers=1), tokens(1, 8)
    optimizer = hf_muon.OptimizerFactory()(model, lr=1e-2, qk_clip=THRESHOLD, qk_clip_exact=True)
    before = copy.deepcopy(model.state_dict())
    model(input_ids=ids, labels=ids).loss.backward()
    model.lm_head.weight.grad[0, 0] = math.inf
    with watching() as found:
        optimizer.step()
    assert optimizer.last_step_skipped and not found
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimizer.zero_grad()
    step(model, optimizer, ids)  # the pass of the skipped step is forgotten
    assert float(largest(model, ids).max()) <= AT_OR_UNDER


def test_trainer_keeps_the_threshold_at_every_step_with_accumulation(tmp_path) -> None:
    """Every step sees the same rows, so what it measures is what the step before has left."""
    model = exploding(how="sdpa", num_hidden_layers=3)
    args = "ns_dtype=float32,qk_clip=20,qk_clip_exact=true,diagnostics=1,muon_lr=1e-2,adam_lr=1e-3"
    batch = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4}
    trainer = make_trainer(tmp_path, token_rows(4), model, optim_args=args, lr_scheduler_type="constant", **batch)
    trainer.train()
    seen = [entry["diag_max_attention_logit"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert seen[0] > 3 * THRESHOLD
    assert len(seen) == 4 and all(0.5 * THRESHOLD < value <= THRESHOLD for value in seen[1:])


def test_compiled_layers_are_clipped_like_any_other() -> None:
    """The observer breaks the graph at each attention; the repeated pass runs without the compiler."""
    base, ids = exploding(how="sdpa", num_hidden_layers=1), tokens(1, 8)
    results = []
    for compiled in (False, True):
        model = copy.deepcopy(base)
        optimizer = hf_muon.OptimizerFactory()(model, lr=1e-3, qk_clip=THRESHOLD, qk_clip_exact=True)
        for layer in model.model.layers if compiled else ():
            layer.compile(backend="eager")
        step(model, optimizer, ids)
        results.append((model.state_dict(), float(optimizer.qk_clip.largest)))
    assert results[0][1] == results[1][1] > 3 * THRESHOLD
    assert all(torch.equal(value, results[1][0][name]) for name, value in results[0][0].items())
