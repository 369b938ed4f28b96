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


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_case_03_adapters_on_stacked_experts_are_one_matrix_per_expert(model_type: str) -> None:
    """The oracle is PEFT's own product: the matrices that the views name for one expert change that expert alone."""
    model = adapted(model_type, target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    rows, count = rows_of(model), 4
    for name, module in model.named_modules():
        if not hasattr(module, "parameter_name"):
            continue
        for part in (module.lora_A["default"], module.lora_B["default"]):
            part.weight.data.normal_()
        before = module.get_delta_weight("default").detach().clone()
        for leaf, tensor in (("lora_A", module.lora_A["default"].weight), ("lora_B", module.lora_B["default"].weight)):
            view = rows[f"{name}.{leaf}.default.weight"].view
            assert view.routed and all(shape[0] == count for shape in view.matrix_shapes(tensor.shape))
            assert len(view.parts) == (2 if leaf == "lora_B" and "gate_up" in module.parameter_name else 0)
            for expert in range(count):
                kept = tensor.detach().clone()
                matrices = [matrix.clone() for matrix in view.matrices(kept)]
                for index, matrix in enumerate(matrices):
                    matrix[expert] += 1.0
                    tensor.data.copy_(view.assemble(matrices, like=kept))
                    changed = (module.get_delta_weight("default") != before).flatten(1).any(1).tolist()
                    assert changed == [e == expert for e in range(count)], (name, leaf, index)
                tensor.data.copy_(kept)


def test_full_fine_tuning_and_adapters_agree_on_heads() -> None:
    torch.manual_seed(0)
    plain = rows_of(tiny_model("bert", "SequenceClassification"))
    wrapped = rows_of(adapted("bert", "SequenceClassification", target_modules=["query"], task_type="SEQ_CLS"))
    assert plain["classifier.weight"].algorithm == "adamw"
    assert any("classifier" in name for name in wrapped)
    assert all(row.algorithm == "adamw" for name, row in wrapped.items() if "classifier" in name)
