# SPDX-License-Identifier: Apache-2.0
"""`matrix_split=per_head`: the blocks are the heads that the module's own forward pass uses.

The oracle is the model: what reaches the output projection from one head is set to zero, and then nothing in the rows
that the view calls this head may matter, while the rows of any other head do.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from hf_muon.param_groups import MatrixView, explain_parameters
from hf_muon.param_groups.fused import note_left_whole
from tests.support.tiny_models import tiny_model


@dataclass(frozen=True)
class Case:
    """A model, its output projections, and its projections with the parts that are split by head."""

    model_type: str
    output: str
    projections: dict[str, tuple[int, ...]]
    head: str = "CausalLM"
    overrides: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.model_type, *(f"{key}={value}" for key, value in self.overrides.items())])


SEPARATE = {"q_proj.weight": (0,), "k_proj.weight": (0,), "v_proj.weight": (0,)}
BERT = {"self.query.weight": (0,), "self.key.weight": (0,), "self.value.weight": (0,)}
LATENT = {"q_b_proj.weight": (0,), "kv_b_proj.weight": (0, 1)}
CASES = [
    Case("llama", "self_attn.o_proj", SEPARATE),
    Case("qwen3", "self_attn.o_proj", SEPARATE),
    Case("gemma2", "self_attn.o_proj", SEPARATE),
    Case("opt", "self_attn.out_proj", SEPARATE),
    Case("gptj", "attn.out_proj", SEPARATE),
    Case("bert", "attention.output.dense", BERT, "MaskedLM"),
    Case("electra", "attention.output.dense", BERT, "MaskedLM"),
    Case("distilbert", "out_lin", {f"{x}_lin.weight": (0,) for x in "qkv"}, "MaskedLM"),
    Case("mpnet", "attn.o", {f"attn.{x}.weight": (0,) for x in "qkv"}, "MaskedLM"),
    Case("gpt2", "attn.c_proj", {"c_attn.weight": (0, 1, 2)}),
    Case("gpt_bigcode", "attn.c_proj", {"c_attn.weight": (0, 1, 2)}, overrides={"multi_query": True}),
    Case("gpt_bigcode", "attn.c_proj", {"c_attn.weight": (0, 1, 2)}, overrides={"multi_query": False}),
    Case("gpt_neox", "attention.dense", {"query_key_value.weight": (0, 1, 2)}),
    Case("bloom", "self_attention.dense", {"query_key_value.weight": (0, 1, 2)}),
    Case("persimmon", "self_attn.dense", {"query_key_value.weight": (0, 1, 2)}),
    Case(
        "falcon",
        "self_attention.dense",
        {"query_key_value.weight": (0, 1, 2)},
        overrides={"new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    Case("falcon", "self_attention.dense", {"query_key_value.weight": (0, 1, 2)}, overrides={"multi_query": True}),
    Case("phi3", "self_attn.o_proj", {"qkv_proj.weight": (0, 1, 2)}),
    Case("dbrx", "attn.out_proj", {"Wqkv.weight": (0, 1, 2)}),
    Case("mpt", "attn.out_proj", {"Wqkv.weight": (0, 1, 2)}),
    Case("modernbert", "attn.Wo", {"Wqkv.weight": (0, 1, 2)}, "MaskedLM"),
    Case("codegen", "attn.out_proj", {"qkv_proj.weight": (0, 1, 2)}),
    Case("deberta", "attention.output.dense", {"in_proj.weight": (0, 1, 2)}, "MaskedLM"),
    Case("qwen3_next", "self_attn.o_proj", {"self_attn.q_proj.weight": (0,), "self_attn.v_proj.weight": (0,)}),
    Case("deepseek_v3", "self_attn.o_proj", LATENT),
    Case("youtu", "self_attn.o_proj", LATENT),
]


def _randomise(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "A_log" not in name:
            parameter.normal_(std=0.3)


@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_a_head_is_what_reaches_the_output_projection_as_one(case: Case) -> None:
    model = tiny_model(case.model_type, case.head, **case.overrides).eval()
    _randomise(model)
    rows = [
        row for row in explain_parameters(model, matrix_split="per_head") if row.name.endswith(tuple(case.projections))
    ]
    named = dict(model.named_parameters())
    config = model.config
    num_heads = config.num_attention_heads
    ids = torch.randint(3, config.vocab_size, (1, 7))
    silent: range = range(0)

    def silence(module: nn.Module, args: tuple) -> tuple:
        size = args[0].shape[-1] // num_heads
        kept = args[0].clone()
        kept[..., silent.start * size : silent.stop * size] = 0
        return (kept, *args[1:])

    outputs = [module for name, module in model.named_modules() if name.endswith(case.output)]
    for module in outputs:
        module.register_forward_pre_hook(silence)

    assert rows and outputs
    for suffix, parts in case.projections.items():
        members = [row for row in rows if row.name.endswith(suffix)]
        assert members, suffix
        for part in parts:
            blocks = members[0].view.matrices(named[members[0].name])[part]
            count = blocks.shape[0]
            assert blocks.ndim == 3
            chosen = int(torch.randint(count, ()))
            silent = range(chosen * num_heads // count, (chosen + 1) * num_heads // count)
            quiet = model(input_ids=ids).logits
            _perturb(named, members, part, [chosen])
            # the head's output is multiplied by exact zeros: only the order of sums may differ
            torch.testing.assert_close(model(input_ids=ids).logits, quiet, atol=1e-5, rtol=1e-5)
            if count > 1:
                _perturb(named, members, part, [i for i in range(count) if i != chosen])
                assert not torch.allclose(model(input_ids=ids).logits, quiet, atol=1e-3), "the test would be vacuous"


def _perturb(named: dict[str, nn.Parameter], rows: list, part: int, heads: list[int]) -> None:
    for row in rows:
        matrices = [matrix.clone() for matrix in row.view.matrices(named[row.name])]
        matrices[part][heads] = 0.3 * torch.randn_like(matrices[part][heads])
        named[row.name].copy_(row.view.assemble(matrices, like=named[row.name]))


def test_key_and_value_heads_are_counted_on_their_own_and_the_output_stays_whole() -> None:
    rows = {
        row.name.split("layers.0.")[-1]: row
        for row in explain_parameters(tiny_model("llama"), matrix_split="per_head")
    }
    shapes = {name: row.view.matrix_shapes(row.shape) for name, row in rows.items() if row.is_muon}
    assert shapes["self_attn.q_proj.weight"] == [(4, 8, 32)]
    assert shapes["self_attn.k_proj.weight"] == shapes["self_attn.v_proj.weight"] == [(2, 8, 32)]
    assert shapes["self_attn.o_proj.weight"] == [(1, 32, 32)]
    assert shapes["mlp.gate_proj.weight"] == [(1, 48, 32)]


def test_latent_attention_splits_the_up_projections_only() -> None:
    rows = explain_parameters(tiny_model("deepseek_v3", device="meta"), matrix_split="per_head")
    shapes = {row.name.rsplit("self_attn.", 1)[-1]: row.view.matrix_shapes(row.shape) for row in rows if row.is_muon}
    assert shapes["q_b_proj.weight"] == [(4, 12, 24)]  # 8 without and 4 with position, one matrix per head
    assert shapes["kv_b_proj.weight"] == [(4, 8, 16), (4, 8, 16)]
    assert shapes["q_a_proj.weight"] == [(1, 24, 32)]
    assert shapes["kv_a_proj_with_mqa.weight"] == [(1, 16, 32), (1, 4, 32)]
    assert shapes["o_proj.weight"] == [(1, 32, 32)]


def test_glm5_gets_its_own_rule() -> None:
    rows = explain_parameters(tiny_model("glm_moe_dsa", device="meta"), matrix_split="per_head")
    split = {row.name.rsplit(".", 2)[-2] for row in rows if any(row.view.head_rows)}
    assert split == {"q_b_proj", "kv_b_proj"}


def test_gates_and_state_space_projections_stay_as_fused_leaves_them() -> None:
    model = tiny_model("qwen3_next", device="meta")
    views = {
        row.name.rsplit("layers.", 1)[-1][2:]: row.view for row in explain_parameters(model, matrix_split="per_head")
    }
    assert views["self_attn.q_proj.weight"].head_rows == (8, 0)  # query by head, output gate whole
    assert views["linear_attn.in_proj_qkvz.weight"].head_rows == (8, 8, 8, 0)
    assert not views["linear_attn.in_proj_ba.weight"].head_rows
    mamba = explain_parameters(tiny_model("bamba", device="meta"), matrix_split="per_head")
    assert not any(row.view.head_rows for row in mamba if "mamba" in row.name)


def test_fused_and_none_never_split_by_head() -> None:
    model = tiny_model("llama", device="meta")
    for split in ("auto", "fused", "none"):
        assert not any(row.view.head_rows for row in explain_parameters(model, matrix_split=split))


@pytest.mark.parametrize("name", ["LlamaAttention", "NobodyKnowsAttention"])
def test_unknown_attention_stays_whole_and_says_so_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    note_left_whole.cache_clear()
    attention = type(name, (nn.Module,), {"__module__": "transformers_modules.somebody"})()
    attention.q_proj, attention.num_heads, attention.head_dim = nn.Linear(8, 16), 4, 4
    model = nn.Sequential(attention, nn.Linear(8, 8))
    with caplog.at_level(logging.INFO, logger="hf_muon"):
        for _ in range(2):
            assert all(row.view.is_plain for row in explain_parameters(model, matrix_split="per_head") if row.is_muon)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [f"{name}.q_proj is orthogonalized as one matrix: heads unknown, its code was not read."]


def test_numbers_that_do_not_fit_leave_the_projection_whole(caplog: pytest.LogCaptureFixture) -> None:
    note_left_whole.cache_clear()
    model = tiny_model("llama", device="meta")
    model.model.layers[0].self_attn.head_dim = 7
    with caplog.at_level(logging.INFO, logger="hf_muon"):
        rows = explain_parameters(model, matrix_split="per_head")
    assert [bool(row.view.head_rows) for row in rows if "q_proj" in row.name] == [False, True]
    assert (
        "LlamaAttention.q_proj is orthogonalized as one matrix: heads unknown, 32 rows are no heads of 7"
        in caplog.text
    )


def test_a_view_by_head_survives_json_and_refuses_local_rows() -> None:
    view = MatrixView(groups=2, parts=(4, 2, 2), head_rows=(2, 2, 0))
    assert MatrixView.from_dict(view.to_dict()) == view
    old = {
        key: value for key, value in MatrixView(parts=(2, 2)).to_dict().items() if key not in ("head_rows", "routed")
    }
    assert MatrixView.from_dict(old) == MatrixView(parts=(2, 2))  # what an earlier version wrote
    tensor = torch.randn(16, 5)
    assert view.matrix_shapes((16, 5)) == [(4, 2, 5), (2, 2, 5), (1, 4, 5)]
    assert torch.equal(view.assemble(view.matrices(tensor)), tensor)
    with pytest.raises(ValueError, match="must see whole heads of 4 rows; got 6 rows"):
        MatrixView(head_rows=(4,)).matrices(torch.zeros(6, 3))
    with pytest.raises(ValueError, match="one entry of head_rows per part"):
        MatrixView(parts=(2, 2), head_rows=(2,))
