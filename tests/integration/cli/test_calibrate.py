# SPDX-License-Identifier: Apache-2.0
"""`hf-muon calibrate`, and what `hf-muon plan` makes of its file."""

import contextlib
import io
import json
import os

import pytest
import torch.distributed as dist

from hf_muon.cli.app import main
from hf_muon.distributed.rates import read_rates
from tests.support.worker_pool import run_on_ranks


def call(*words):
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    return stop.value.code or 0


def test_calibrate_then_plan_and_simulate(tmp_path, capsys):
    path = tmp_path / "rates.json"
    words = ["--device", "cpu", "--dtype", "float32", "--seconds", "0.5", "--output", str(path)]
    assert call("calibrate", *words) == 0
    said = capsys.readouterr()
    assert "TFLOP/s" in said.out and "64 x 64" in said.out and str(path) in said.err
    rates = read_rates(path)
    page = tmp_path / "plan.html"
    words = ["SmolLM2-135M", "--world-size", "12", "--rates", str(path), "--simulate", "--html", str(page), "--json"]
    assert call("plan", *words, "--set", "inter_bytes=1e9", "--set", "launch=0") == 0
    document = json.loads(capsys.readouterr().out)
    assert all("ns_seconds" in row for row in document["owners"])
    simulation = document["simulation"]
    assert simulation["device"]["name"] == rates.device and simulation["device"]["measured"]
    assert simulation["device"]["product_flops"] == rates.product_flops
    assert (simulation["device"]["inter_bytes"], simulation["device"]["launch"]) == (1e9, 0.0)
    assert sorted({row["ranks"] for row in simulation["steps"]}) == [
        8,
        12,
        16,
        32,
        64,
        128,
        256,
        512,
        1024,
        2048,
        4096,
    ]
    busiest = max(row["ns_seconds"] for row in document["owners"])
    owned = next(r for r in simulation["steps"] if (r["design"], r["ranks"]) == ("dmuon-z3", 12))
    assert owned["newton_schulz_seconds"] == pytest.approx(busiest, rel=1e-9)
    text = page.read_text()
    assert 'class="mem"' in text and 'class="sim"' in text and "Fastest Muon on" in text
    addresses = {part.split('"')[0] for part in text.split("https://")[1:]}
    assert not addresses


def test_tables_of_a_simulation(capsys):
    words = ["--world-size", "16", "--simulate", "--device", "a100", "--grouped"]
    assert call("plan", "SmolLM2-135M", *words) == 0
    out = capsys.readouterr().out
    for text in ("Simulated step on a100", "4 x 2048 tokens", "ms, 16 ranks", "dmuon-hsdp", "Fastest Muon on 8"):
        assert text in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "launch=0"], "--device, --set and --grouped are for --simulate. Add --simulate."),
        (["--device", "a100"], "--device, --set and --grouped are for --simulate. Add --simulate."),
        (["--simulate", "--set", "pass_share=inf"], "pass_share must be a share of product_flops"),
        (["--simulate", "--set", "ns_share=1.5"], "above 0 and at most 1; got '1.5'"),
        (["--simulate", "--set", "ranks_per_node=2.5"], "ranks_per_node must be a whole number of at least 1"),
        (["--simulate", "--set", "pass_share"], "For instance pass_share=0.5."),
        (["--simulate", "--set", "lunch=0"], "'lunch' is no figure of a device. Did you mean 'launch'?"),
        (["--simulate", "--set", "launch"], "--set must be KEY=VALUE; got 'launch'."),
        (["--simulate", "--device", "h10"], "device must be one of a100, h100, h200, b200; got 'h10'."),
        (["--rates", "nowhere.json"], "rates must be a file that hf-muon calibrate wrote; got nowhere.json"),
    ],
)
def test_bad_input_is_one_line_with_code_2(words, message, capsys):
    assert call("plan", "SmolLM2-135M", "--world-size", "8", *words) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and message in said.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "tpu"], "--device must be auto, cpu or cuda; got 'tpu'."),
        (["--seconds", "0", "--device", "cpu"], "seconds must be a number above 0; got 0.0."),
        (["--dtype", "int3", "--device", "cpu"], "dtype must be one of auto, float32"),
        (["--output", "no/such/rates.json"], "--output must lie in a folder that exists; got no/such/rates.json."),
    ],
)
def test_bad_calibration_is_one_line_with_code_2(words, message, capsys):
    assert call("calibrate", *words) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and message in said.err


def calibrate_as_torchrun_does(path):
    """Run the command on this rank with the environment of torchrun; return what it printed."""
    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()))
    words = ["calibrate", "--device", "cpu", "--dtype", "float32", "--seconds", "0.5", "--json", "--output", path]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
            main(words)
    finally:
        del os.environ["RANK"], os.environ["WORLD_SIZE"]
    return printed.getvalue()


def test_two_ranks_measure_their_link(tmp_path):
    path = tmp_path / "rates.json"
    first, second = run_on_ranks(2, calibrate_as_torchrun_does, str(path))
    rates = read_rates(path)
    assert json.loads(first) == rates.to_dict() and second == ""
    assert rates.link_bytes > 1e5 and 0 < rates.link_latency < 5
