# SPDX-License-Identifier: Apache-2.0
"""LoRA: adapters on Muon, modules_to_save on AdamW, adapters saved whole, a second adapter starts fresh."""

import pytest
import torch

peft = pytest.importorskip("peft")

from tests.support.trainer_runs import make_trainer, plain_optimizer, tiny_llama, token_rows


def lora(**options):
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(tiny_llama(), config)


def test_adapters_are_on_muon_and_saved_modules_on_adamw(tmp_path):
    model = lora(modules_to_save=["lm_head", "embed_tokens"])
    trainer = make_trainer(tmp_path, model=model)
    trainer.train()
    groups = plain_optimizer(trainer).param_groups
    muon = [name for group in groups if group["use_muon"] for name in group["param_names"]]
    adamw = [name for group in groups if not group["use_muon"] for name in group["param_names"]]
    assert len(muon) == 8 and all("lora_" in name for name in muon)
    assert len(adamw) == 2 and all("modules_to_save" in name for name in adamw)
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(tiny_llama(), tmp_path / "adapter").eval()
    ids = token_rows(1)[0]["input_ids"][None]
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, model.eval()(input_ids=ids).logits)


def test_case_34_a_second_adapter_starts_with_no_momentum(tmp_path):
    model = lora()
    first = make_trainer(tmp_path, model=model, save_strategy="steps", save_steps=4)
    first.train()
    state = torch.load(tmp_path / "checkpoint-4" / "optimizer.pt", weights_only=True)
    model.add_adapter("second", peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    model.set_adapter("second")
    second = make_trainer(tmp_path / "second", model=model)
    second.create_optimizer()
    optimizer = plain_optimizer(second)
    optimizer.load_state_dict(state)  # names of the first adapter: nothing may be inherited
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert len(names) == 8 and all("second" in name for name in names)
    for group in optimizer.param_groups:
        assert not any(optimizer.state[p]["momentum_buffer"].any() for p in group["params"])
