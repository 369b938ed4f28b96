# SPDX-License-Identifier: Apache-2.0
"""`conv=flatten`: dense kernels as the matrix that acts on patches; everything else about convolutions stays."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_muon.param_groups import MatrixView, explain_parameters, summarize
from tests.support.family_table import PAGE, render
from tests.support.tiny_models import tiny_model


def rows_of(model: nn.Module, **options) -> dict:
    return {row.name: row for row in explain_parameters(model, **options)}


def test_case_05_convolutions_are_on_adamw_unless_asked_for() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Linear(4, 4))
    assert rows_of(model)["0.weight"].algorithm == "adamw"
    row = rows_of(model, conv="flatten")["0.weight"]
    assert row.algorithm == "muon" and row.view.matrix_shapes(row.shape) == [(1, 8, 36)]
    assert row.rule == "convolution read as (out, in * kernel) (Conv2d)"
    assert rows_of(model, conv="flatten")["0.bias"].algorithm == "adamw"
    assert rows_of(model, conv="flatten", exclude=["^0"])["0.weight"].algorithm == "adamw"


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Conv1d(6, 4, 5), (1, 4, 30)),
        (nn.Conv2d(6, 4, (2, 3)), (1, 4, 36)),
        (nn.Conv3d(6, 4, 2), (1, 4, 48)),
        (nn.ConvTranspose1d(6, 4, 5), (1, 20, 6)),
        (nn.ConvTranspose2d(6, 4, (2, 3)), (1, 24, 6)),
    ],
)
def test_the_matrix_is_the_one_that_the_forward_pass_multiplies_patches_with(module: nn.Module, shape: tuple) -> None:
    row = rows_of(nn.ModuleDict({"conv": module}), conv="flatten")["conv.weight"]
    assert row.view.matrix_shapes(row.shape) == [shape]
    (matrix,) = row.view.matrices(module.weight.detach())
    spatial = (1,) * (module.weight.ndim - 2) if row.view.transposed else module.kernel_size
    patch = torch.randn(1, module.in_channels, *spatial)
    with torch.no_grad():
        module.bias.zero_()
        result = module(patch).flatten()
    torch.testing.assert_close(matrix @ patch.flatten(), result, rtol=1e-5, atol=1e-5)  # sums in another order


@pytest.mark.parametrize(
    ("module", "rule"),
    [
        (nn.Conv1d(8, 8, 3, groups=8), "depthwise or grouped convolution"),
        (nn.Conv2d(8, 8, 3, groups=2), "depthwise or grouped convolution"),
        (nn.ConvTranspose1d(8, 8, 3, groups=4), "depthwise or grouped convolution"),
        (nn.Conv1d(8, 1, 3), "convolution with a single row or column"),
    ],
)
def test_kernels_that_are_no_matrix_stay_on_adamw_and_say_why(module: nn.Module, rule: str) -> None:
    row = rows_of(nn.Sequential(module, nn.Linear(4, 4)), conv="flatten")["0.weight"]
    assert row.algorithm == "adamw" and row.rule.startswith(rule)


def test_case_05_patch_embeddings_stay_on_adamw_whatever_they_are_made_of() -> None:
    rows = rows_of(tiny_model("vit", "ImageClassification", device="meta"), conv="flatten")
    row = rows["vit.embeddings.patch_embeddings.projection.weight"]
    assert row.algorithm == "adamw" and "embedding" in row.rule


def test_speech_encoders_move_their_feature_extractor_to_muon() -> None:
    model = tiny_model("wav2vec2", "CTC", device="meta")
    plain, flat = rows_of(model), rows_of(model, conv="flatten")
    gained = {name for name in plain if plain[name].algorithm != flat[name].algorithm}
    assert gained == {f"wav2vec2.feature_extractor.conv_layers.{i}.conv.weight" for i in (0, 1)}  # not the grouped one
    assert flat[gained.pop()].view == MatrixView(flatten=True)
    assert summarize(flat.values()).share > summarize(plain.values()).share


def test_muon_share_by_family_is_up_to_date() -> None:
    assert PAGE.read_text() == render(), "run python -m tests.support.family_table"
