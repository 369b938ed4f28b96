# SPDX-License-Identifier: Apache-2.0
"""PEFT models: adapters on Muon, embeddings, heads, magnitudes on AdamW, whatever wraps them."""

from __future__ import annotations

import pytest
import torch

from hf_muon.param_groups import MatrixView, explain_parameters, tag_parameters
from tests.support.tiny_models import tiny_model

peft = pytest.importorskip("peft")


def adapted(model_type: str, head: str = "CausalLM", **options):
    model = tiny_model(model_type, head)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, **options))


def rows_of(model, **options) -> dict:
    return {row.name: row for row in explain_parameters(model, **options)}


def test_lora_pairs_are_on_muon_and_the_base_has_no_rows() -> None:
    rows = rows_of(adapted("llama", target_modules=["q_proj", "down_proj"]))
    assert len(rows) == 2 * 2 * 2  # layers, modules, A and B
    assert all(row.algorithm == "muon" and row.role == "lora" for row in rows.values())


def test_case_05_modules_to_save_keep_the_role_of_what_they_wrap() -> None:
    rows = rows_of(adapted("llama", target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head", "up_proj"]))
    saved = {name: row for name, row in rows.items() if "modules_to_save" in name}
    for name, row in saved.items():
        assert row.algorithm == ("muon" if "up_proj" in name else "adamw"), row
    assert {row.role for name, row in saved.items() if "up_proj" not in name} == {"embedding", "head"}


def test_a_sequence_classification_head_is_on_adamw() -> None:
    rows = rows_of(adapted("llama", "SequenceClassification", target_modules=["q_proj"], task_type="SEQ_CLS"))
    score = [row for name, row in rows.items() if "score" in name]
    assert score and all(row.algorithm == "adamw" for row in score)


def test_lora_on_embeddings_and_heads_follows_the_wrapped_module() -> None:
    rows = rows_of(adapted("llama", target_modules=["q_proj", "embed_tokens", "lm_head"]))
    for name, row in rows.items():
        assert row.algorithm == ("muon" if "q_proj" in name else "adamw"), row


def test_dora_magnitudes_are_vectors() -> None:
    rows = rows_of(adapted("llama", target_modules=["q_proj"], use_dora=True))
    magnitudes = [row for name, row in rows.items() if "magnitude" in name]
    assert magnitudes and all(row.algorithm == "adamw" for row in magnitudes)


@pytest.mark.parametrize(
    ("model_type", "target", "base"),
    [
        ("phi3", "qkv_proj", MatrixView(parts=(32, 16, 16))),
        ("gpt_neox", "query_key_value", MatrixView(groups=4, parts=(8, 8, 8))),
        ("gpt2", "c_attn", MatrixView(parts=(32, 32, 32))),
    ],
)
def test_case_14_lora_b_of_a_fused_projection_is_split_like_it(model_type: str, target: str, base: MatrixView) -> None:
    rows = rows_of(adapted(model_type, target_modules=[target]))
    assert {row.view for name, row in rows.items() if "lora_B" in name} == {base}
    assert {row.view for name, row in rows.items() if "lora_A" in name} == {MatrixView()}
    plain = rows_of(adapted(model_type, target_modules=[target]), matrix_split="none")
    assert all(row.view.is_plain for row in plain.values())


def test_case_34_a_second_adapter_gets_its_own_rows() -> None:
    model = adapted("llama", target_modules=["q_proj"])
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["v_proj"]))
    model.set_adapter("second")
    names = tag_parameters(model)
    assert names and all(".second." in name for name in names)


def test_full_fine_tuning_and_adapters_agree_on_heads() -> None:
    torch.manual_seed(0)
    plain = rows_of(tiny_model("bert", "SequenceClassification"))
    wrapped = rows_of(adapted("bert", "SequenceClassification", target_modules=["query"], task_type="SEQ_CLS"))
    assert plain["classifier.weight"].algorithm == "adamw"
    assert any("classifier" in name for name in wrapped)
    assert all(row.algorithm == "adamw" for name, row in wrapped.items() if "classifier" in name)
