# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding: the odds, the bits, bfloat16 momentum, and weights without a float32 master."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from hf_muon import MuonConfig
from hf_muon.optim import MuonWithAuxAdam
from hf_muon.optim.rounding import Rounding, round_to_bfloat16
from hf_muon.optim.variants import refuse_variants


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def neighbours(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bfloat16 numbers towards zero and away from it, by truncating the bits of float32."""
    towards = (values.view(torch.int32) & -65536).view(torch.float32)
    away = ((values.view(torch.int32) & -65536) + 65536).view(torch.float32)
    return towards, away


def test_every_result_is_a_neighbour_and_the_mean_is_the_value(seed) -> None:
    values = torch.randn(200) * torch.logspace(-30, 30, 200)
    draws = 4000
    rounded = round_to_bfloat16(values.expand(draws, 200).contiguous(), generator(seed)).double()
    towards, away = neighbours(values)
    assert bool(((rounded == towards) | (rounded == away)).all())
    spacing = (away.double() - towards.double()).abs()
    odds = (values.double() - towards.double()).abs() / spacing  # of rounding away
    deviation = spacing * (odds * (1 - odds) / draws).sqrt()
    # 200 means at 5.5 standard errors: a right rounding fails once in 10**5 runs; one unit of 2**-16 for odds of zero.
    error = (rounded.mean(dim=0) - values.double()).abs()
    assert bool((error <= 5.5 * deviation + spacing / 65536).all())


def test_representable_values_inf_and_nan_stay() -> None:
    exact = torch.randn(500).bfloat16()
    assert torch.equal(round_to_bfloat16(exact.float(), generator(0)), exact)
    special = torch.tensor([math.inf, -math.inf, 0.0, -0.0, math.nan])
    rounded = round_to_bfloat16(special, generator(0))
    assert torch.equal(rounded[:4].float(), special[:4])
    assert bool(rounded[4].isnan())


def test_bits_depend_on_seed_step_and_name_alone_and_leave_torch_alone(seed) -> None:
    values, param = torch.randn(64, 64), torch.zeros(1)

    def bits(rounding: Rounding, name: str) -> torch.Tensor:
        target = torch.empty(64, 64, dtype=torch.bfloat16)
        rounding.store_(target, values, name, param)
        return target

    before = torch.get_rng_state()
    first = bits(Rounding(3, 7), "a.weight")
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    assert torch.equal(bits(Rounding(3, 7), "a.weight"), first)
    for rounding, name in ((Rounding(4, 7), "a.weight"), (Rounding(3, 8), "a.weight"), (Rounding(3, 7), "b.weight")):
        assert 0.3 < float((bits(rounding, name) != first).float().mean()) < 0.5  # 1/3 of independent pairs differ


# ---------------------------------------------------------------------- bfloat16 momentum


def test_bfloat16_momentum_is_the_float32_one_in_the_mean(seed) -> None:
    """One matrix under 200 names: each draws its own bits, the mean of their momenta is the unrounded one."""
    count, beta = 200, 0.95
    grads = [torch.randn(4, 6) for _ in range(6)]
    params = [torch.nn.Parameter(torch.zeros(4, 6)) for _ in range(count)]
    named = [(f"layer.{i}", param) for i, param in enumerate(params)]
    optimizer = MuonWithAuxAdam(
        [{"params": named, "use_muon": True}], lr=0.0, momentum_dtype="bfloat16", ns_steps=1, ns_dtype="float32"
    )
    exact = torch.zeros(4, 6, dtype=torch.float64)
    spread = torch.zeros_like(exact)
    for grad in grads:
        for param in params:
            param.grad = grad.clone()
        optimizer.step()
        exact = beta * exact + (1 - beta) * grad.double()
        spread = beta**2 * spread + (exact.abs() * 2**-7) ** 2 / 4  # variance of one rounding is at most spacing^2/4
    momenta = torch.stack([optimizer.state[param]["momentum_buffer"] for param in params])
    assert momenta.dtype == torch.bfloat16
    error = (momenta.double().mean(dim=0) - exact).abs()
    assert bool((error <= 5.5 * (spread / count).sqrt() + 1e-6).all())
    # Rounding to nearest stands still once (1 - beta) of the gradient is below half a spacing; random rounding moves.
    assert len(momenta.unique(dim=0)) > count // 2


def test_bfloat16_momentum_resumes_to_the_bit_and_loads_other_dtypes(
    make_model, give_gradients, snapshot, same
) -> None:
    def fresh() -> tuple[torch.nn.Module, MuonWithAuxAdam]:
        model = make_model(0)
        return model, MuonWithAuxAdam(model.named_parameters(), lr=0.01, momentum_dtype="bfloat16", rounding_seed=5)

    model, optimizer = fresh()
    other_model, other = fresh()
    for step in range(5):
        give_gradients(model, step)
        optimizer.step()
        if step == 2:
            saved = copy.deepcopy(optimizer.state_dict())
            other_model.load_state_dict(copy.deepcopy(model.state_dict()))
            assert saved["state"][0]["momentum_buffer"].dtype == torch.bfloat16
            other.load_state_dict(saved)
        if step > 2:
            give_gradients(other_model, step)
            other.step()
    assert same(snapshot(optimizer), snapshot(other))

    wide = MuonWithAuxAdam(make_model(0).named_parameters(), lr=0.01)
    wide.load_state_dict(saved)
    momentum = wide.state[wide.param_groups[0]["params"][0]]["momentum_buffer"]
    assert momentum.dtype == torch.float32
    assert torch.equal(momentum.bfloat16(), saved["state"][0]["momentum_buffer"])
    other.load_state_dict(wide.state_dict())
    assert other.state[other.param_groups[0]["params"][0]]["momentum_buffer"].dtype == torch.bfloat16


def test_a_masked_step_leaves_bfloat16_state_and_weights_to_the_bit(
    make_model, give_gradients, snapshot, same
) -> None:
    model = make_model(0).bfloat16()
    options = {"momentum_dtype": "bfloat16", "stochastic_rounding": "true", "normuon": True, "offload": "cpu"}
    optimizer = MuonWithAuxAdam(model.named_parameters(), lr=0.01, weight_decay=0.1, fused_adam="true", **options)
    optimizer.skip_on_device = True
    give_gradients(model, 0)
    optimizer.step()
    before = snapshot(optimizer)
    give_gradients(model, 1)
    model.up.weight.grad[0, 0] = math.nan
    optimizer.step()
    assert same(before, snapshot(optimizer))
    assert optimizer.last_step_skipped


# ---------------------------------------------------------------------- weights without a float32 master


def bfloat16_start() -> dict[str, torch.Tensor]:
    numbers = generator(1)
    return {key: (torch.randn(8, 12, generator=numbers) * 0.02).bfloat16() for key in ("muon", "adamw")}


def movements(choice: str, dtype: torch.dtype, steps: int, copies: int) -> dict[str, torch.Tensor]:
    """Train `copies` equal parameters of each half on the same gradients; return how far each copy moved."""
    numbers, start = generator(2), bfloat16_start()
    grads = [
        {key: torch.randn(value.shape, generator=numbers).bfloat16() for key, value in start.items()}
        for _ in range(steps)
    ]
    params = {
        key: [torch.nn.Parameter(value.to(dtype, copy=True)) for _ in range(copies)] for key, value in start.items()
    }
    groups = [
        {"params": [(f"{key}.{i}", p) for i, p in enumerate(members)], "use_muon": key == "muon"}
        for key, members in params.items()
    ]
    optimizer = MuonWithAuxAdam(groups, lr=2e-5, stochastic_rounding=choice, ns_dtype="float32", eps=1e-8)
    for grad in grads:
        for key, members in params.items():
            for param in members:
                param.grad = grad[key].to(dtype, copy=True)
        optimizer.step()
    return {
        key: torch.stack([p.detach().double() - start[key].double() for p in members])
        for key, members in params.items()
    }


def test_case_15_bfloat16_weights_move_as_float32_ones_in_the_mean_only_with_stochastic_rounding() -> None:
    steps, copies, start = 6, 200, bfloat16_start()
    exact = movements("auto", torch.float32, steps, 1)
    nearest = movements("false", torch.bfloat16, steps, 1)
    first_step = movements("false", torch.bfloat16, 1, 1)
    random = movements("true", torch.bfloat16, steps, copies)
    assert float((first_step["muon"] != 0).double().mean()) < 0.15
    for key, (wanted,) in exact.items():
        mean, energy = random[key].mean(dim=0), wanted.square().sum()
        # Rounding a step of size d between neighbours s apart has variance d (s - d). Elements of Muon's step are
        # within three times their RMS of 0.2 lr, those of AdamW's within 1.5 lr.
        spacing = 2.0 ** (start[key].double().abs().log2().floor() - 7)
        variance = steps * spacing * 2e-5 * {"muon": 0.6, "adamw": 1.5}[key]
        deviation = float((wanted.square() * variance / copies).sum().sqrt() / energy)
        share = float((mean * wanted).sum() / energy)
        assert abs(share - 1) < 5 * deviation, (key, share, deviation)
        assert 5 * deviation < 0.5, (key, deviation)  # or the line above could not tell
        assert float((nearest[key][0] * wanted).sum() / energy) < 0.5, key


def test_low_precision_weights_warn_unless_the_user_has_chosen(make_model, give_gradients, caplog) -> None:
    for choice, expected in (("auto", 1), ("false", 0), ("true", 0)):
        caplog.clear()
        model = make_model(0).bfloat16()
        optimizer = MuonWithAuxAdam(model.named_parameters(), lr=0.01, stochastic_rounding=choice)
        give_gradients(model, 0)
        optimizer.step()
        found = [record for record in caplog.records if "stochastic_rounding=true" in record.getMessage()]
        assert len(found) == expected, choice


def test_averages_of_stochastically_rounded_weights_are_float32(make_model, give_gradients, snapshot, same) -> None:
    model = make_model(0).bfloat16()
    optimizer = MuonWithAuxAdam(model.named_parameters(), lr=0.01, stochastic_rounding="true")
    assert optimizer.state[model.embed.weight]["exp_avg"].dtype == torch.float32
    give_gradients(model, 0)
    optimizer.step()
    other = MuonWithAuxAdam(model.named_parameters(), lr=0.01, stochastic_rounding="true")
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert same(snapshot(optimizer), snapshot(other))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("momentum_dtype=int4", "momentum_dtype must be one of float32, bfloat16"),
        ("stochastic_rounding=maybe", "stochastic_rounding must be one of auto, true, false; got 'maybe'"),
        ("rounding_seed=-1", "rounding_seed must be a whole number of at least 0; got -1"),
        ("normuon_beta2=1", r"normuon_beta2 must lie in \[0, 1\); got 1.0"),
        ("offload=disk", "offload must be one of none, cpu; got 'disk'"),
        ("qk_clip=0", "qk_clip must be above 0; got 0. Leave it out"),
        ("qk_clip=-3", "qk_clip must be finite and not negative; got -3.0"),
        ("diagnostics=-1", "diagnostics must be a whole number of at least 0; got -1"),
    ],
)
def test_wrong_options_are_named(text, sentence) -> None:
    with pytest.raises(ValueError, match=sentence):
        MuonConfig.from_optim_args(text)


@pytest.mark.parametrize(
    "text",
    [
        "momentum_dtype=bfloat16",
        "offload=cpu",
        "stochastic_rounding=true",
        "normuon=true",
        "qk_clip=100",
        "diagnostics=5",
    ],
)
def test_a_backend_with_a_step_of_its_own_refuses_variants(text) -> None:
    refuse_variants(MuonConfig.from_optim_args("stochastic_rounding=false,ns_steps=3"), "under DeepSpeed")
    name = text.partition("=")[0]
    with pytest.raises(NotImplementedError, match=f"^{name} must be left out under DeepSpeed; got "):
        refuse_variants(MuonConfig.from_optim_args(text), "under DeepSpeed")
