# SPDX-License-Identifier: Apache-2.0
"""`hf-muon run` end to end on few steps: files, contract, report, repetition, continuation."""

import json
import math
import re

import pytest

from hf_muon.cli.app import main

SMALL = [
    "training.steps=4", "training.batch_size=2", "training.warmup_steps=1", "training.eval_points=2",
    "training.device=cpu", "training.threads=1",
    "task.block_size=32", "task.vocab_size=400", "task.max_rows=20", "task.eval_rows=4",
    "model.hidden_size=32", "model.intermediate_size=48", "model.num_hidden_layers=1",
    "search.muon=[1e-2]", "search.adamw=[1e-3]", "search.seeds=[0, 1]",
]  # fmt: skip


def call(*words):
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    return stop.value.code or 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "first"
    assert call("run", "demo", *SMALL, "--output-dir", str(out)) == 0
    return out


@pytest.fixture(scope="module")
def results(folder):
    return json.loads((folder / "results.json").read_text())


def test_results_keep_the_contract(results):
    assert {"recipe", "runs", "comparison", "versions"} <= set(results)
    assert results["complete"] and results["recipe"] == "demo"
    assert [(run["optimizer"], run["seed"]) for run in results["runs"]] == [
        ("muon", 0), ("adamw", 0), ("muon", 1), ("adamw", 1)
    ]  # fmt: skip
    for run in results["runs"]:
        assert len(run["loss"]) == run["steps"] == 4
        assert all(math.isfinite(loss) for loss in run["loss"])
        assert 0 < run["optimizer_seconds"] < run["seconds"]
        assert run["step_seconds"] == sorted(run["step_seconds"])
        assert run["peak_memory_bytes"] > 2**20
        assert [point["step"] for point in run["eval"]["curve"]] == [2, 4]
        assert math.isfinite(run["eval"]["loss"]) and math.isfinite(run["eval"]["validation"]["loss"])
        assert run["config"]["learning_rate"] in (1e-2, 1e-3)
    assert {"torch", "transformers", "hf-muon"} <= set(results["versions"])


def test_both_optimizers_start_alike_and_end_apart(results):
    muon, adamw = results["runs"][:2]
    assert muon["initial_weights"] == adamw["initial_weights"]
    # Same weights, same first batch: the first loss is the same number.
    assert muon["loss"][0] == adamw["loss"][0]
    assert muon["loss"][-1] != adamw["loss"][-1]
    assert results["runs"][2]["initial_weights"] != muon["initial_weights"]


def test_muon_keeps_one_buffer_where_adamw_keeps_two(results):
    muon, adamw = results["runs"][:2]
    matrices = results["model"]["routing"]["muon"]["elements"]
    saved = adamw["optimizer_state_bytes"] - muon["optimizer_state_bytes"]
    # float32: 4 bytes per element saved, but for the step counters of the AdamW half.
    assert saved == pytest.approx(4 * matrices, abs=4 * 100)


def test_files_of_a_run(folder):
    names = {path.name for path in folder.iterdir()}
    assert {"results.json", "report.html", "config.yaml", "loss.png"} <= names
    assert (folder / "muon-lr0.01-seed0" / "checkpoint-4" / "model.safetensors").is_file()
    assert (folder / "muon-lr0.01-seed0" / "checkpoint-4" / "tokenizer.json").is_file()


def test_the_report_holds_its_data_and_fetches_nothing(folder, results):
    page = (folder / "report.html").read_text()
    assert not re.search(r"https?://|<link|<img|@import|url\(|src=", page)
    drawn = [json.loads(text.replace("&quot;", '"')) for text in re.findall(r'data-points="([^"]*)"', page)]
    assert len(drawn) == 2 * 6  # two widths of four curves, the grid and the seeds
    training = drawn[2]  # the held-out chart twice, then the training chart
    mean = (results["runs"][0]["loss"][0] + results["runs"][2]["loss"][0]) / 2
    assert training[0]["s"] == "muon" and training[0]["t"] == f"step 1: {mean:.3f}"
    assert "prefers-color-scheme: dark" in page and "width=device-width" in page


def test_the_written_config_repeats_the_run(folder, results, tmp_path, capsys):
    again = tmp_path / "again"
    assert call("run", str(folder / "config.yaml"), "--output-dir", str(again), "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert [run["loss"] for run in document["runs"]] == [run["loss"] for run in results["runs"]]
    assert [run["eval"]["loss"] for run in document["runs"]] == [run["eval"]["loss"] for run in results["runs"]]


def test_an_interrupted_run_continues_where_it_stopped(folder, results, tmp_path, monkeypatch, capsys):
    import hf_muon.cli.training.search as search

    out = tmp_path / "stopped"
    train_once, names = search.train_once, []

    def stop_after_two(recipe, task, spec, *rest):
        if len(names) == 2:
            raise KeyboardInterrupt
        names.append(spec.name)
        return train_once(recipe, task, spec, *rest)

    monkeypatch.setattr(search, "train_once", stop_after_two)
    assert call("run", "demo", *SMALL, "--output-dir", str(out)) == 1
    assert "finished runs are kept" in capsys.readouterr().err
    partial = json.loads((out / "results.json").read_text())
    assert not partial["complete"] and len(partial["runs"]) == 2
    monkeypatch.setattr(search, "train_once", train_once)
    assert call("run", "demo", *SMALL, "--output-dir", str(out)) == 0
    whole = json.loads((out / "results.json").read_text())
    assert [run["loss"] for run in whole["runs"]] == [run["loss"] for run in results["runs"]]
    assert call("run", "demo", *SMALL, "training.steps=5", "--output-dir", str(out)) == 2
    assert "holds a run with other settings" in capsys.readouterr().err


@pytest.mark.slow
def test_addition_end_to_end(tmp_path):
    out = tmp_path / "sums"
    small = ["training.steps=3", "training.threads=1", "task.eval_rows=20", "search.seeds=[0]", "training.device=cpu"]
    small += ["search.muon=[1e-2]", "search.adamw=[1e-3]", "model.hidden_size=32", "model.num_hidden_layers=1"]
    assert call("run", "addition", *small, "--output-dir", str(out)) == 0
    document = json.loads((out / "results.json").read_text())
    assert document["comparison"]["metric"] == "exact_match"
    assert all(0 <= run["eval"]["exact_match"] <= 1 for run in document["runs"])
    assert "held-out exact match" in (out / "report.html").read_text()
