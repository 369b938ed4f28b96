# SPDX-License-Identifier: Apache-2.0
"""`hf-muon plan`: tables, one JSON document, the picture, and bad input."""

import json

import pytest

import hf_muon
from hf_muon.cli.app import main


def call(*words):
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    return stop.value.code or 0


def test_json_is_what_the_function_returns(capsys):
    assert call("plan", "SmolLM2-135M", "--world-size", "8", "--replicate", "2", "--json") == 0
    assert json.loads(capsys.readouterr().out) == hf_muon.plan("SmolLM2-135M", world_size=8, replicate=2).to_dict()


def test_tables_and_picture(tmp_path, capsys):
    page = tmp_path / "plan.html"
    words = ["--world-size", "8", "--micro-batch", "2", "--seq-len", "512", "--html", str(page)]
    assert call("plan", "SmolLM2-135M", *words) == 0
    said = capsys.readouterr()
    for text in ("SmolLM2-135M on 8 ranks", "Muon (P_M)", "dmuon-z3 muon", "Start with z2:", "x the mean"):
        assert text in said.out
    assert str(page) in said.err and page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["SmolLM2-135M"], "Missing option '--world-size'"),
        (["SmolLM2-135M", "--world-size", "0"], "world_size must be a whole number of at least 1; got 0."),
        (["SmolLM2-135M", "--world-size", "8", "--replicate", "3"], "replicate must divide world_size; got 3 and 8."),
        (["SmolLM2-135M", "--world-size", "8", "--micro-batch", "3"], "must come together with seq_len"),
        (["Qwen2.5-3C", "--world-size", "8"], "got 'Qwen2.5-3C'. Did you mean 'Qwen2.5-3B'?"),
        (["SmolLM2-135M", "--world-size", "x"], "Invalid value for '--world-size'"),
    ],
)
def test_bad_input_is_one_line_with_code_2(words, message, capsys):
    assert call("plan", *words) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and message in said.err


def test_a_picture_that_cannot_be_written_is_code_1(tmp_path, capsys):
    words = ["--world-size", "2", "--html", str(tmp_path / "no" / "plan.html"), "--json"]
    assert call("plan", "SmolLM2-135M", *words) == 1
    said = capsys.readouterr()
    assert said.out == "" and "--html must be a path that can be written" in said.err
