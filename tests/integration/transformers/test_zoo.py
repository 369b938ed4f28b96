# SPDX-License-Identifier: Apache-2.0
"""Two steps through the stock Trainer for 90 model types: the intended tensors move, no others."""

from __future__ import annotations

import pytest
import torch
from transformers import Trainer, TrainingArguments

from tests.support.tiny_models import tiny_model
from tests.support.trainer_runs import arguments, plain_optimizer
from tests.support.zoo_inputs import OVERRIDES, collate, rows_for
from tests.unit.param_groups.expected_routing import EXPECTED, expected_names, short_name

# Left out to save time: line-for-line relatives of types that are here (and three with large fixed sizes).
RELATIVES = """
apertus arcee biogpt blenderbot camembert cohere cohere2 data2vec-text dots1 ernie ernie4_5 eurobert exaone4 flex_olmo
gemma gemma3_text glm4 granite granitemoe helium hunyuan_v1_dense hunyuan_v1_moe ibert ijepa lfm2_moe longformer
m2m_100 marian mbart megatron-bert ministral mt5 nemotron nemotron_h nystromformer olmo2 olmo3 pegasus pegasus_x
phimoe plbart qwen2 qwen2_vl qwen3 roberta roformer seed_oss smollm3 stablelm t5gemma umt5 vaultgemma xglm
xlm-roberta"""
ZOO = [(model_type, head) for model_type, head in sorted(EXPECTED) if model_type not in RELATIVES.split()]


@pytest.fixture(scope="module")
def args(tmp_path_factory: pytest.TempPathFactory) -> TrainingArguments:
    """One object for every type; no decay and a constant rate, so that only a gradient moves anything."""
    return arguments(
        tmp_path_factory.mktemp("zoo"),
        max_steps=2,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_strategy="no",
    )


def watch_gradients(model: torch.nn.Module) -> dict[str, bool]:
    """Return a mapping that says, after training, which tensors ever had a non-zero gradient."""
    seen: dict[str, bool] = {}
    for name, parameter in model.named_parameters():
        seen[name] = False
        if parameter.requires_grad:

            def note(tensor: torch.Tensor, name: str = name) -> None:
                seen[name] |= bool(tensor.grad.any())

            parameter.register_post_accumulate_grad_hook(note)
    return seen


def test_the_zoo_holds_at_least_eighty_types() -> None:
    assert len({model_type for model_type, _ in ZOO}) >= 80
    assert {model_type for model_type, _ in EXPECTED} >= set(RELATIVES.split())


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "head"), ZOO, ids=["-".join(pair) for pair in ZOO])
def test_two_steps_move_exactly_the_intended_tensors(model_type: str, head: str, args: TrainingArguments) -> None:
    model = tiny_model(model_type, head, **OVERRIDES.get(model_type, {}))
    on_muon, _ = expected_names(model_type, head)
    matrices = [name for name, p in model.named_parameters() if short_name(name) in on_muon and p.requires_grad]
    frozen = matrices[0]
    model.get_parameter(frozen).requires_grad_(False)
    seen = watch_gradients(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=rows_for(model_type, head, model.config),
        data_collator=collate(head),
    )
    trainer.train()

    named = dict(model.named_parameters())
    moved = {name for name, p in named.items() if not torch.equal(p, before[name])}
    assert all(bool(p.isfinite().all()) for p in named.values())
    assert moved == {name for name, had in seen.items() if had}  # frozen and gradient-less tensors among the rest
    assert frozen not in moved
    optimizer = plain_optimizer(trainer)
    halves = {True: set(), False: set()}
    for group in optimizer.param_groups:
        halves[group["use_muon"]] |= set(group["param_names"])
        for parameter in group["params"]:
            assert set(optimizer.state[parameter]) >= ({"momentum_buffer"} if group["use_muon"] else {"exp_avg"})
    assert halves[True] == set(matrices) - {frozen}
    assert halves[False] == {name for name, p in named.items() if p.requires_grad} - halves[True]
    # most matrices must really have been trained: a model that gets no gradient would pass everything above
    assert len(moved & halves[True]) >= 0.5 * len(halves[True]), sorted(halves[True] - moved)
