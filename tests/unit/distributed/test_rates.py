# SPDX-License-Identifier: Apache-2.0
"""A file of rates: round trip, interpolation, and what is refused."""

import json
import logging
import math

import pytest
import torch

import hf_muon
from hf_muon.distributed.ownership import Matrix
from hf_muon.distributed.rates import (
    NS_STEPS,
    DeviceRates,
    ShapeSeconds,
    device_name,
    read_rates,
    warn_of_other_device,
    work_on,
)
from hf_muon.orthogonalize import ns_flops
from hf_muon.planning.calibration import calibrate

ROWS = (
    ShapeSeconds(64, 64, "standard", 1e-3),
    ShapeSeconds(256, 256, "standard", 2e-2),
    ShapeSeconds(64, 256, "gram", 2e-3),
    ShapeSeconds(256, 1024, "gram", 5e-2),
)
RATES = DeviceRates("cpu test", "cpu", "float32", 4e10, 5e9, ROWS, torch="2.13", threads=2, link_bytes=1e9)


def test_round_trip(tmp_path):
    RATES.write(tmp_path / "rates.json")
    back = read_rates(tmp_path / "rates.json")
    assert back == RATES and back.digest() == RATES.digest()
    assert back.link_latency is None
    other = DeviceRates("cpu test", "cpu", "float32", 4e10, 5e9, ROWS[:3], torch="2.13", threads=2, link_bytes=1e9)
    assert other.digest() != RATES.digest()


def test_measured_shapes_give_their_seconds_and_others_lie_between():
    for row in ROWS:
        assert RATES.seconds(row.short, row.long) == pytest.approx(row.seconds)
        assert RATES.seconds(row.long, row.short, 3) == pytest.approx(3 * row.seconds)

    def rate(m, n, seconds):
        return ns_flops(m, n, steps=NS_STEPS) / seconds

    low, high = rate(64, 64, 1e-3), rate(256, 256, 2e-2)
    middle = rate(128, 128, RATES.seconds(128, 128))
    assert middle == pytest.approx((low + high) / 2)  # 128 is half-way by logarithm
    assert rate(32, 32, RATES.seconds(32, 32)) == pytest.approx(low)  # outside: the nearest
    assert rate(1024, 1024, RATES.seconds(1024, 1024)) == pytest.approx(high)
    assert RATES.seconds(0, 5) == 0.0


def test_costs_of_a_plan_are_seconds():
    matrix = Matrix.of_parameter("w", (3, 64, 256), "", work=work_on("cpu", RATES))
    assert matrix.cost == pytest.approx(3 * 2e-3) and matrix.experts == 3
    plan = hf_muon.plan("SmolLM2-135M", world_size=8, rates=RATES).to_dict()
    flops = hf_muon.plan("SmolLM2-135M", world_size=8).to_dict()
    assert sum(row["ns_flops"] for row in plan["owners"]) == sum(row["ns_flops"] for row in flops["owners"])
    assert all(row["ns_seconds"] > 0 for row in plan["owners"])
    assert "ns_seconds" not in flops["owners"][0]
    seconds = [row["ns_seconds"] for row in plan["owners"]]
    assert plan["imbalance"] == pytest.approx(max(seconds) * 8 / sum(seconds))
    assert 1.0 <= plan["imbalance_lower_bound"] <= plan["imbalance"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("product_flops"), "no key 'product_flops'"),
        (lambda d: d.update(format=9), "format must be 1, not 9"),
        (lambda d: d.update(newton_schulz=[]), "newton_schulz must have at least one row"),
        (lambda d: d["newton_schulz"][0].update(seconds=0), "positive seconds of known forms"),
        (lambda d: d["newton_schulz"][0].update(method="cubic"), "positive seconds of known forms"),
        (lambda d: d.update(memory_bytes=math.nan), "memory_bytes must be above 0, not nan"),
        (lambda d: d.update(link_bytes="fast"), "could not convert"),
        (lambda d: d.update(threads=math.inf), "cannot convert float infinity"),
        (lambda d: d["newton_schulz"][0].update(long=10**400), "positive seconds of known forms"),
        (lambda d: d["newton_schulz"][0].update(seconds=1e-320), "positive seconds of known forms"),
    ],
)
def test_bad_files_are_one_error(tmp_path, change, message):
    data = RATES.to_dict()
    change(data)
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="rates must be a file that hf-muon calibrate wrote") as error:
        read_rates(path)
    assert message in str(error.value) and str(path) in str(error.value)


def test_what_is_no_file_of_rates(tmp_path):
    for text in ("[1]", "{", "3", "[" * 100_000):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(ValueError, match="rates must be a file that hf-muon calibrate wrote"):
            read_rates(tmp_path / "x.json")
    with pytest.raises(ValueError, match="No such file"):
        read_rates(tmp_path / "absent.json")
    with pytest.raises(TypeError, match="rates must be the path of a file; got 3"):
        hf_muon.MuonConfig(rates=3)
    assert hf_muon.MuonConfig.from_optim_args("rates=a/b.json").rates == "a/b.json"
    assert hf_muon.MuonConfig.from_optim_args({"rates": "none"}).rates is None


def test_another_device_or_dtype_is_one_warning(caplog):
    cpu = torch.device("cpu")
    here = DeviceRates(device_name(cpu), "cpu", "float32", 1.0, 1.0, ROWS)
    with caplog.at_level(logging.WARNING, logger="hf_muon.distributed"):
        assert not warn_of_other_device(here, cpu, "float32")
        assert not caplog.records
        assert warn_of_other_device(here, cpu, "bfloat16")
        assert warn_of_other_device(RATES, cpu, "float32")
    assert len(caplog.records) == 2
    assert "but this run uses" in caplog.text and "Run hf-muon calibrate here." in caplog.text


def test_calibration_measures_every_form_and_keeps_its_time():
    import time

    start = time.perf_counter()
    seen = []
    rates = calibrate("cpu", seconds=0.5, dtype="float32", on_row=seen.append)
    assert time.perf_counter() - start < 10  # half a second, on a machine that others use
    assert tuple(seen) == rates.newton_schulz and rates.dtype == "float32"
    assert rates.device == device_name(torch.device("cpu")) and rates.torch == torch.__version__
    assert rates.product_flops > 1e8 and rates.memory_bytes > 1e7 and rates.link_bytes is None
    assert all(row.seconds > 0 for row in rates.newton_schulz)
    with pytest.raises(ValueError, match="seconds must be a number above 0; got 0"):
        calibrate("cpu", seconds=0)


def test_one_process_finds_a_wrong_path_and_says_that_it_has_no_owners(tmp_path, caplog):
    def make(path):
        return hf_muon.MuonWithAuxAdam([{"params": [param], "use_muon": True}], lr=1e-3, rates=str(path))

    param = torch.nn.Parameter(torch.randn(8, 6))
    with pytest.raises(ValueError, match="rates must be a file that hf-muon calibrate wrote"):
        make(tmp_path / "absent.json")
    RATES.write(tmp_path / "rates.json")
    optimizer = make(tmp_path / "rates.json")
    with caplog.at_level(logging.INFO, "hf_muon"):
        for _ in range(2):
            param.grad = torch.randn_like(param)
            optimizer.step()
    assert [record.getMessage() for record in caplog.records if "is not used" in record.getMessage()] == [
        f"rates={tmp_path / 'rates.json'} is not used: no matrix has an owner here."
    ]
