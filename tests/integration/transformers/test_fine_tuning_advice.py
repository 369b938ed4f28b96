# SPDX-License-Identifier: Apache-2.0
"""Full fine-tuning of a pretrained model gets one recommendation; nothing else does."""

from __future__ import annotations

import logging

import pytest
from transformers import LlamaForCausalLM

from hf_muon.integrations.transformers.routing_table import warn_once
from tests.support.trainer_runs import make_trainer, tiny_llama

LOGGER = "hf_muon.integrations.transformers"


@pytest.fixture
def pretrained(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "model")
    warn_once.cache_clear()
    return lambda: LlamaForCausalLM.from_pretrained(tmp_path / "model")


def advice(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "fine-tuning" in r.getMessage()]


def test_full_fine_tuning_is_advised_once(pretrained, tmp_path, caplog) -> None:
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        for _ in range(2):
            make_trainer(tmp_path, model=pretrained(), max_steps=1).train()
    (line,) = advice(caplog)
    assert line.startswith(f"Full fine-tuning of {tmp_path / 'model'} with Muon: if AdamW pretrained it")
    assert "docs/fine_tuning.md" in line


def test_training_from_scratch_parts_and_adapters_get_no_advice(pretrained, tmp_path, caplog) -> None:
    peft = pytest.importorskip("peft")
    frozen = pretrained()
    for name, parameter in frozen.named_parameters():
        parameter.requires_grad_("layers.1.mlp" in name)
    adapted = peft.get_peft_model(
        pretrained(), peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", r=32)
    )
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        for model in (tiny_llama(), frozen, adapted):
            make_trainer(tmp_path, model=model, max_steps=1).train()
    assert not advice(caplog)
