# SPDX-License-Identifier: Apache-2.0
"""Field case 14: the parts of a fused projection are what the module's own forward pass uses them for.

The oracle is the model itself. Zeroing the query rows must make the key rows irrelevant, zeroing the gate rows must
make the up rows irrelevant (silu(0) = gelu(0) = 0), and so on; a single row in the wrong part breaks the equality.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from hf_muon.param_groups import MatrixView, explain_parameters
from tests.support.tiny_models import tiny_model

QKV = ((0, (1,)), (1, (0,)), (2, (0, 1)))  # no query: keys do nothing; ...; no value: neither does
GATE_UP = ((0, (1,)), (1, (0,)))


@dataclass(frozen=True)
class Case:
    """A fused tensor; `silences`: zero part i (or the tensors `others`), and the listed parts do nothing."""

    model_type: str
    suffix: str
    num_parts: int
    silences: tuple[tuple[int | None, tuple[int, ...]], ...]
    overrides: dict[str, Any] = field(default_factory=dict)
    head: str = "CausalLM"
    others: tuple[str, ...] = ()
    others_value: float = 0.0

    def __str__(self) -> str:
        extra = ",".join(f"{key}={value}" for key, value in self.overrides.items())
        return f"{self.model_type}-{self.suffix}{'-' + extra if extra else ''}"


NEW_FALCON = {"new_decoder_architecture": True, "num_kv_heads": 2}
CASES = [
    Case("phi3", "qkv_proj.weight", 3, QKV),
    Case("phi3", "gate_up_proj.weight", 2, GATE_UP),
    Case("gpt2", "c_attn.weight", 3, QKV),
    Case("openai-gpt", "c_attn.weight", 3, QKV),
    Case("gpt_bigcode", "c_attn.weight", 3, QKV, {"multi_query": True}),
    Case("gpt_bigcode", "c_attn.weight", 3, QKV, {"multi_query": False}),
    Case("gpt_neox", "query_key_value.weight", 3, QKV),
    Case("falcon", "query_key_value.weight", 3, QKV, NEW_FALCON),
    Case("falcon", "query_key_value.weight", 3, QKV, {"multi_query": True}),
    Case("falcon", "query_key_value.weight", 3, QKV, {"multi_query": False, "num_kv_heads": 4}),
    Case("bloom", "query_key_value.weight", 3, QKV),
    Case("persimmon", "query_key_value.weight", 3, QKV),
    Case("mpt", "Wqkv.weight", 3, QKV),
    Case("dbrx", "Wqkv.weight", 3, QKV),
    Case("codegen", "qkv_proj.weight", 3, ((0, (2,)), (2, (0,)), (1, (0, 2)))),
    Case("minimax", "qkv_proj.weight", 3, ((0, (1, 2)), (1, (0, 2)), (2, (0, 1)))),  # linear attention
    Case("jetmoe", "kv_proj.weight", 2, ((1, (0,)),)),
    Case("modernbert", "Wqkv.weight", 3, QKV, head="MaskedLM"),
    Case("modernbert", "Wi.weight", 2, GATE_UP, head="MaskedLM"),
    Case("deberta", "in_proj.weight", 3, ((2, (0, 1)),), head="MaskedLM"),
    Case("glm", "gate_up_proj.weight", 2, GATE_UP),
    Case("glm4", "gate_up_proj.weight", 2, GATE_UP),
    Case("moshi", "fc1.weight", 2, GATE_UP),
    Case("granitemoehybrid", "shared_mlp.input_linear.weight", 2, GATE_UP),
    Case("jetmoe", "mlp.input_linear.weight", 2, GATE_UP),
    Case("mixtral", "experts.gate_up_proj", 2, GATE_UP),
    Case("qwen3_moe", "experts.gate_up_proj", 2, GATE_UP),
    Case("llama4_text", "experts.gate_up_proj", 2, GATE_UP),
    Case("gpt_oss", "experts.gate_up_proj", 2, ((0, (1,)),)),  # the up half is shifted by one there
    Case("mamba", "in_proj.weight", 2, GATE_UP),
    Case("falcon_mamba", "in_proj.weight", 2, ((1, (0,)),)),
    Case("jamba", "mamba.in_proj.weight", 2, GATE_UP),
    Case("zamba", "in_proj.weight", 2, GATE_UP),
    Case("mamba2", "in_proj.weight", 5, ((0, (1, 2, 3, 4)), (1, (2, 3, 4)), (2, (3,)), (3, (2,)))),
    Case("bamba", "mamba.in_proj.weight", 5, ((0, (1, 2, 3, 4)), (1, (2, 3, 4)), (2, (3,)), (3, (2,)))),
    Case("lfm2", "conv.in_proj.weight", 3, ((0, (1, 2)), (1, (0, 2)), (2, (0, 1)))),
    Case("qwen3_next", "in_proj_qkvz.weight", 4, ((2, (0, 1)), (3, (0, 1, 2)))),
    Case("qwen3_next", "in_proj_ba.weight", 2, ((None, (1,)),), others=("A_log",), others_value=-1e4),
    Case("qwen3_next", "self_attn.q_proj.weight", 2, ((None, (0,)),), others=("self_attn.k_proj.weight",)),
    Case("qwen3_5_text", "in_proj_qkv.weight", 3, ((2, (0, 1)),)),
    Case("deepseek_v3", "kv_b_proj.weight", 2, ((1, (0,)), (None, (0,))), others=("q_b_proj.weight",)),
    Case("deepseek_v3", "kv_a_proj_with_mqa.weight", 2, ((None, (1,)),), others=("q_b_proj.weight",)),
    Case("youtu", "kv_b_proj.weight", 2, ((1, (0,)),)),
    Case("timesformer", "attention.qkv.weight", 3, QKV, head="VideoClassification"),
]


def _inputs(case: Case, config: Any) -> dict[str, torch.Tensor]:
    if case.model_type == "timesformer":
        return {"pixel_values": torch.randn(1, config.num_frames, 3, config.image_size, config.image_size)}
    return {"input_ids": torch.randint(3, config.vocab_size, (1, 7))}


def _randomise(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()  # a bias of the projection or the convolution would keep silenced parts alive
        elif parameter.ndim > 1 and "A_log" not in name:
            parameter.normal_(std=0.3)


def _set_part(parameter: torch.Tensor, view: MatrixView, part: int, value: str) -> None:
    matrices = [matrix.clone() for matrix in view.matrices(parameter)]
    matrices[part] = torch.zeros_like(matrices[part]) if value == "zero" else 0.3 * torch.randn_like(matrices[part])
    parameter.copy_(view.assemble(matrices, like=parameter))


@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_case_14_parts_are_what_the_forward_pass_uses(case: Case) -> None:
    torch.manual_seed(torch.seed() % 2**31)
    model = tiny_model(case.model_type, case.head, **case.overrides).eval()
    _randomise(model)
    views = {row.name: row.view for row in explain_parameters(model) if row.name.endswith(case.suffix)}
    assert views and all(len(view.parts) == case.num_parts for view in views.values())
    named = dict(model.named_parameters())
    inputs = _inputs(case, model.config)

    def run() -> torch.Tensor:
        return model(**inputs).logits

    def set_part(part: int, value: str) -> None:
        for name, view in views.items():
            _set_part(named[name], view, part, value)

    base, saved = run(), {name: parameter.clone() for name, parameter in named.items()}
    for part in range(case.num_parts):
        set_part(part, "random")
        assert not torch.allclose(run(), base, atol=1e-4), f"part {part} has no effect: the test would be vacuous"
        _restore(named, saved)
    for silencer, silenced in case.silences:
        if silencer is None:
            for name in named:
                if name.endswith(case.others):
                    named[name].fill_(case.others_value)
        else:
            set_part(silencer, "zero")
        quiet = run()
        for part in silenced:
            set_part(part, "random")
        # the silenced rows multiply exact zeros, so only the order of sums may differ
        torch.testing.assert_close(run(), quiet, atol=1e-5, rtol=1e-5)
        _restore(named, saved)


def test_case_14_fsdp2_subclasses_keep_their_layout() -> None:
    model = tiny_model("phi3", device="meta")
    plain = explain_parameters(model)
    for module in list(model.modules()):  # FSDP2 swaps the class of what it wraps for a subclass of this name
        module.__class__ = type(f"FSDP{type(module).__name__}", (type(module),), {"__module__": "torch.distributed"})
    assert [row.view for row in explain_parameters(model)] == [row.view for row in plain]


@pytest.mark.parametrize("class_name", ["Phi3Attention", "NobodyKnowsAttention"])
def test_case_14_code_that_was_not_read_is_never_split(class_name: str, caplog: pytest.LogCaptureFixture) -> None:
    attention = type(class_name, (nn.Module,), {"__module__": "transformers_modules.somebody"})()
    attention.qkv_proj, attention.num_key_value_heads, attention.head_dim = nn.Linear(8, 16), 1, 4
    with caplog.at_level(logging.INFO, logger="hf_muon"):
        (row,) = [row for row in explain_parameters(nn.Sequential(attention)) if row.is_muon]
    assert row.view.is_plain
    assert f"{class_name}.qkv_proj is orthogonalized as one matrix: no layout is known for it." in caplog.text


def test_case_14_numbers_that_do_not_fit_leave_one_matrix(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("phi3", device="meta")
    model.model.layers[0].self_attn.head_dim = 7
    with caplog.at_level(logging.INFO, logger="hf_muon"):
        views = [row.view for row in explain_parameters(model) if "qkv_proj" in row.name]
    assert [len(view.parts) for view in views] == [0, 3]
    assert (
        "Phi3Attention.qkv_proj is orthogonalized as one matrix" in caplog.text and "cover all output" in caplog.text
    )
    del model.model.layers[0].self_attn.num_key_value_heads
    assert [len(row.view.parts) for row in explain_parameters(model) if "qkv_proj" in row.name] == [0, 3]


def _restore(named: dict[str, nn.Parameter], saved: dict[str, torch.Tensor]) -> None:
    for name, parameter in named.items():
        parameter.copy_(saved[name])
