# SPDX-License-Identifier: Apache-2.0
"""Field cases 1 to 8: which tensors are on Muon, which are not, and what happens at the edges."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from hf_muon.param_groups import MatrixView, explain_parameters, tag_parameters
from tests.support.tiny_models import tiny_model


def rows_of(model: nn.Module, **options) -> dict:
    return {row.name: row for row in explain_parameters(model, **options)}


@pytest.mark.parametrize(
    ("model_type", "head", "embeddings"),
    [
        ("gpt2", "CausalLM", ["transformer.wte.weight", "transformer.wpe.weight"]),
        (
            "t5",
            "Seq2SeqLM",
            ["shared.weight", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"],
        ),
        ("gpt_neox", "CausalLM", ["gpt_neox.embed_in.weight", "embed_out.weight|lm_head.weight"]),
        (
            "bert",
            "MaskedLM",
            ["bert.embeddings.word_embeddings.weight", "bert.embeddings.position_embeddings.weight"],
        ),
        ("mamba", "CausalLM", ["backbone.embeddings.weight"]),
    ],
)
def test_case_01_embeddings_are_known_by_type(model_type: str, head: str, embeddings: list[str]) -> None:
    rows = rows_of(tiny_model(model_type, head, device="meta"))
    for names in embeddings:
        name = next(name for name in names.split("|") if name in rows)
        assert rows[name].algorithm == "adamw"


def test_case_01_an_embedding_with_an_unusual_name_is_still_one() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Embedding(16, 8)
            self.bag = nn.EmbeddingBag(16, 8)
            self.embedding_like_name = nn.Linear(8, 8)

    rows = rows_of(Odd())
    assert rows["inner.weight"].algorithm == rows["bag.weight"].algorithm == "adamw"
    assert rows["embedding_like_name.weight"].algorithm == "muon"


@pytest.mark.parametrize("alias_first", [False, True])
def test_case_02_a_tied_head_is_decided_once(alias_first: bool) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    if alias_first:  # the alias is walked before the embedding
        head = model._modules.pop("lm_head")
        model._modules = {"lm_head": head, **model._modules}
    rows = explain_parameters(model)
    names = [row.name for row in rows]
    assert names == [name for name, _ in model.named_parameters()]
    tied = [row for row in rows if "lm_head" in row.name or "embed_tokens" in row.name]
    assert len(tied) == 1 and tied[0].algorithm == "adamw"
    tag_parameters(model)
    assert model.lm_head.weight.use_muon is False


def test_case_02_a_linear_that_shares_a_table_is_no_matrix() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(8, 16, bias=False)
            self.table = nn.Embedding(16, 8)
            self.table.weight = self.project.weight

    assert rows_of(Shared())["project.weight"].algorithm == "adamw"


@pytest.mark.parametrize(
    ("model_type", "transposed"), [("mixtral", False), ("qwen3_moe", False), ("gpt_oss", True), ("llama4_text", True)]
)
def test_case_03_experts_are_batched_matrices(model_type: str, transposed: bool) -> None:
    model = tiny_model(model_type)
    hidden = model.config.hidden_size
    rows = [row for name, row in rows_of(model).items() if "experts." in name and len(row.shape) == 3]
    assert rows
    for row in rows:
        assert row.algorithm == "muon" and row.view.transposed is transposed
        for batch, m, n in row.view.matrix_shapes(row.shape):
            assert batch == 4  # experts
            assert (n if "gate_up" in row.name else m) == hidden


def test_case_03_per_expert_biases_are_no_matrices() -> None:
    rows = rows_of(tiny_model("gpt_oss", device="meta"))
    biases = [row for row in rows.values() if row.name.endswith("_bias")]
    assert biases and all(len(row.shape) == 2 and row.algorithm == "adamw" and not row.decay for row in biases)


def test_case_03_dbrx_stacks_its_experts() -> None:
    rows = rows_of(tiny_model("dbrx", device="meta"))
    shapes = {
        name.rsplit(".", 1)[1]: row.view.matrix_shapes(row.shape)
        for name, row in rows.items()
        if "experts" in name and row.algorithm == "muon"
    }
    # 4 experts, 48 inner rows; w2 is used as (inner, hidden) without a transpose, so its output side is hidden
    assert shapes == {"w1": [(4, 48, 32)], "v1": [(4, 48, 32)], "w2": [(4, 32, 48)]}


@pytest.mark.parametrize(
    ("model_type", "endings"),
    [
        ("mixtral", ["gate.weight"]),
        ("qwen2_moe", ["mlp.gate.weight", "shared_expert_gate.weight"]),
        ("deepseek_v3", ["gate.weight"]),
        ("gpt_oss", ["router.weight"]),
        ("jetmoe", ["router.layer.weight"]),
        ("hunyuan_v1_moe", ["gate.wg.weight"]),
        ("mamba", ["conv1d.weight", "A_log", ".D"]),
        ("qwen3_next", ["conv1d.weight", "A_log", "dt_bias", "shared_expert_gate.weight"]),
    ],
)
def test_case_04_routers_and_state_space_parameters_are_on_adamw(model_type: str, endings: list[str]) -> None:
    rows = rows_of(tiny_model(model_type, device="meta"))
    for ending in endings:
        found = [row for name, row in rows.items() if name.endswith(ending)]
        assert found and all(row.algorithm == "adamw" for row in found)


def test_case_04_include_switches_routers_and_convolutions() -> None:
    model = tiny_model("qwen3_next", device="meta")
    rows = rows_of(model, include=[r"\.mlp\.gate\.weight$", r"conv1d\.weight$"])
    router = next(row for name, row in rows.items() if name.endswith("mlp.gate.weight"))
    assert router.algorithm == "muon" and router.rule.startswith("include")
    conv = next(row for name, row in rows.items() if name.endswith("conv1d.weight"))
    assert conv.algorithm == "muon" and conv.view == MatrixView(flatten=True)
    channels, _, kernel = conv.shape
    assert conv.view.matrix_shapes(conv.shape) == [(1, channels, kernel)]


def test_case_04_gate_projections_and_unrelated_gates_stay_matrices() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj = nn.Linear(8, 8)
            self.gate = nn.Linear(8, 8)  # no experts beside it: not a router

    class SparseBlock(Block):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(8, 8)])

    assert rows_of(Block())["gate.weight"].algorithm == "muon"
    rows = rows_of(SparseBlock())
    assert rows["gate.weight"].algorithm == "adamw"
    assert rows["gate_proj.weight"].algorithm == rows["experts.0.weight"].algorithm == "muon"


@pytest.mark.parametrize(
    ("model_type", "head", "names"),
    [
        ("llama", "SequenceClassification", ["score.weight"]),
        ("bert", "SequenceClassification", ["classifier.weight"]),
        ("bert", "QuestionAnswering", ["qa_outputs.weight"]),
        ("roberta", "TokenClassification", ["classifier.weight"]),
        ("roberta", "SequenceClassification", ["classifier.dense.weight", "classifier.out_proj.weight"]),
        ("distilbert", "SequenceClassification", ["pre_classifier.weight", "classifier.weight"]),
        ("wav2vec2", "AudioClassification", ["projector.weight", "classifier.weight"]),
        ("vit", "ImageClassification", ["classifier.weight", "vit.embeddings.patch_embeddings.projection.weight"]),
        ("qwen2_vl", "ImageTextToText", ["model.visual.patch_embed.proj.weight", "lm_head.weight"]),
    ],
)
def test_case_05_heads_and_patch_convolutions_are_on_adamw(model_type: str, head: str, names: list[str]) -> None:
    rows = rows_of(tiny_model(model_type, head, device="meta"))
    for name in names:
        assert rows[name].algorithm == "adamw", rows[name].rule


def test_case_05_five_axes_are_refused_on_request() -> None:
    class Video(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.volume = nn.Parameter(torch.zeros(2, 2, 2, 2, 2))
            self.linear = nn.Linear(4, 4)

    assert rows_of(Video())["volume"].algorithm == "adamw"
    with pytest.raises(ValueError, match=r"volume must have two axes, or three with a batch in front"):
        explain_parameters(Video(), include=["volume"])


def test_case_06_conv1d_output_dimension_comes_from_the_module() -> None:
    rows = rows_of(tiny_model("gpt2", device="meta"), matrix_split="none")
    fc = rows["transformer.h.0.mlp.c_fc.weight"]  # stored (in, out)
    assert fc.view.matrix_shapes(fc.shape) == [(1, fc.shape[1], fc.shape[0])]
    square = rows["transformer.h.0.attn.c_proj.weight"]
    assert square.view.transposed, "also where the shape cannot tell"


def test_case_07_frozen_parameters_have_no_row() -> None:
    model = tiny_model("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("self_attn" in name)
    rows = explain_parameters(model)
    assert {row.name for row in rows} == {name for name, _ in model.named_parameters() if "self_attn" in name}
    assert all(row.algorithm == "muon" for row in rows)


def test_case_08_zero3_partitions_show_their_true_shape() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4))
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    rows = rows_of(model)
    assert rows["0.weight"].shape == (4, 6) and rows["0.weight"].algorithm == "muon"
    assert rows["0.bias"].algorithm == rows["1.weight"].algorithm == "adamw"


def test_case_08_flat_parameters_are_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 4))
    model[0].weight.data = torch.empty(12)  # what FSDP1 and flat optimizers leave behind
    with pytest.raises(ValueError, match=r"0\.weight must have its true shape, two axes in a Linear; got \(12,\)"):
        explain_parameters(model)


def test_case_08_fsdp1_is_refused_by_type() -> None:
    FSDP1 = type("FullyShardedDataParallel", (nn.Sequential,), {"__module__": "torch.distributed.fsdp.stand_in"})
    with pytest.raises(ValueError, match=r"must not be wrapped by FSDP1.*Use FSDP2"):
        explain_parameters(FSDP1(nn.Linear(4, 4)))


def test_case_08_little_coverage_is_loud(caplog: pytest.LogCaptureFixture) -> None:
    class Mostly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.unknown = nn.Parameter(torch.zeros(64, 64))

    with caplog.at_level(logging.WARNING, logger="hf_muon"):
        tag_parameters(Mostly())
    assert "Muon covers only 0.4 % of the trainable elements" in caplog.text and "unknown (64, 64)" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="hf_muon"):
        tag_parameters(tiny_model("gemma", vocab_size=4096))  # a large vocabulary is no reason to warn
    assert not caplog.records


def test_case_08_no_coverage_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"at least one tensor on Muon; got 0 of 1.*weight \(3, 3\).*include"):
        tag_parameters(nn.Embedding(3, 3))
    with pytest.raises(ValueError, match="must have trainable parameters; got none"):
        tag_parameters(nn.ReLU())


def test_a_single_row_or_column_and_low_rank_vectors_are_on_adamw() -> None:
    model = nn.ModuleDict({"row": nn.Linear(8, 1), "column": nn.Linear(1, 8), "matrix": nn.Linear(8, 2)})
    rows = rows_of(model)
    assert [rows[f"{name}.weight"].algorithm for name in ("row", "column", "matrix")] == ["adamw", "adamw", "muon"]


def test_linear_subclasses_and_torch_attention_are_matrices() -> None:
    class MyLinear(nn.Linear):
        pass

    rows = rows_of(nn.ModuleDict({"a": MyLinear(4, 4), "attention": nn.MultiheadAttention(8, 2)}))
    assert rows["a.weight"].algorithm == "muon"
    assert rows["attention.in_proj_weight"].view == MatrixView(parts=(8, 8, 8))
    assert rows["attention.in_proj_bias"].algorithm == "adamw"
    assert rows["attention.out_proj.weight"].algorithm == "muon"


def test_an_unknown_raw_matrix_is_left_to_adamw_and_named() -> None:
    class Raw(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixing = nn.Parameter(torch.zeros(8, 8))

    row = rows_of(Raw())["mixing"]
    assert row.algorithm == "adamw" and "no rule knows Raw.mixing" in row.rule
    assert rows_of(Raw(), include=["mixing"])["mixing"].algorithm == "muon"


def test_meta_and_real_models_are_routed_alike() -> None:
    assert explain_parameters(tiny_model("qwen3_moe", device="meta")) == explain_parameters(tiny_model("qwen3_moe"))
