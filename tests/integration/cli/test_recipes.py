# SPDX-License-Identifier: Apache-2.0
"""The recipes of the published experiments end to end on their tiny settings: scores, kills, full disks, processes."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_muon.cli.app import main

ROOT = Path(__file__).resolve().parents[3]
RUNS = ["muon-lr0.01-seed42", "adamw-lr0.003-seed42"]
# One rate each: two trainings of 8 steps, with a checkpoint after 4, and three evaluations of 8 rows.
SMALL = ["--tiny", "search.muon=[1e-2]", "search.adamw=[3e-3]", "training.device=cpu", "training.threads=1"]
GSM8K = ["run", "gsm8k", *SMALL, "task.eval_batch_size=2"]
CPU_PROCESSES = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: 'no'
num_machines: 1
num_processes: 2
machine_rank: 0
rdzv_backend: static
same_network: true
main_training_function: main
use_cpu: true
"""


def call(*words):
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    return stop.value.code or 0


def read(folder):
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("recipes") / "gsm8k"
    assert call(*GSM8K, "--output-dir", str(out)) == 0
    return out


def measured(document):
    """Everything of a run that does not depend on the clock or the folder."""
    runs = {}
    for run in document["runs"]:
        scores = run["eval"]["benchmarks"]["gsm8k"]
        curve = [(point["step"], point["loss"]) for point in run["eval"]["curve"]]
        runs[run["name"]] = (run["loss"], run["eval"]["validation"]["loss"], curve, scores["correct"], scores["n"])
    return runs, document["comparison"]["benchmarks"]


def completions(folder, name):
    lines = (folder / name / "samples-gsm8k.jsonl").read_text().splitlines()
    return {row["id"]: row["completion"] for row in map(json.loads, lines)}


def test_gsm8k_scores_both_optimizers_and_the_base_beside_the_published(folder):
    document = read(folder)
    assert document["complete"] and [run["name"] for run in document["runs"]] == RUNS
    for run in document["runs"]:
        assert run["steps"] == len(run["loss"]) == 8 and all(map(math.isfinite, run["loss"]))
        assert run["loss"][-1] < run["loss"][0]  # ends of 8 steps on text: far from a tie
        scores = run["eval"]["benchmarks"]["gsm8k"]
        assert {"task", "model", "n", "correct", "score", "stderr", "settings", "samples_file"} <= set(scores)
        assert scores["n"] == 8 and scores["settings"]["max_new_tokens"] == 24
    entry = document["comparison"]["benchmarks"]["gsm8k"]
    assert set(entry["measured"]) == {"base", "adamw", "muon"}
    assert (entry["published"]["adamw"], entry["published"]["muon"]) == (0.805, 0.810)
    assert {"difference", "standard_error", "p", "n01", "n10"} <= set(entry["paired"]) and entry["paired"]["n"] == 8
    page = (folder / "report.html").read_text()
    assert "<h2>Benchmarks</h2>" in page and "80.5 ± 1.1" in page and "exact McNemar test" in page
    kept = sorted(str(path.relative_to(folder)) for path in folder.glob("*/*") if path.is_dir())
    assert kept == sorted(f"{name}/model" for name in RUNS)


def start(out, reached):
    """Start the command in a process of its own and kill it with SIGKILL once `reached()` holds."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", "from hf_muon.cli.app import main; main()", *GSM8K, "--output-dir", str(out)]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    limit = time.monotonic() + 240
    try:
        while not reached():
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < limit, "never got there"
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stderr.close()


@pytest.mark.slow
def test_killed_while_training_and_while_scoring_the_result_is_the_same(folder, tmp_path, capsys):
    out = tmp_path / "killed"
    second = out / RUNS[1]
    start(out, lambda: (second / "checkpoint-4" / "watch.json").exists())
    assert [run["name"] for run in read(out)["runs"]] == RUNS[:1]
    # A checkpoint that was cut short is passed over and removed.
    (second / "checkpoint-7").mkdir(exist_ok=True)
    samples = out / "base" / "samples-gsm8k.jsonl"
    start(out, lambda: samples.exists() and samples.stat().st_size > 0)
    assert not read(out)["complete"] and len(read(out)["runs"]) == 2
    with samples.open("a") as lines:  # as a kill in the middle of a write leaves it
        lines.write('{"id": 7, "compl')
    assert call(*GSM8K, "--output-dir", str(out)) == 0
    assert "Continuing: 2 of 2 runs are already there" in capsys.readouterr().err
    assert measured(read(out)) == measured(read(folder))
    for name in ("base", *RUNS):
        assert completions(out, name) == completions(folder, name)


def test_a_full_disk_is_one_error_and_the_next_start_continues(folder, tmp_path, monkeypatch, capsys):
    import safetensors.torch
    import transformers.modeling_utils

    out = tmp_path / "full"
    save = safetensors.torch.save_file
    calls = []

    def full_at_the_second(*arguments, **options):
        calls.append(1)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return save(*arguments, **options)

    monkeypatch.setattr(transformers.modeling_utils, "safe_save_file", full_at_the_second)
    assert call(*GSM8K, "task.benchmarks=[]", "--output-dir", str(out)) == 1
    said = capsys.readouterr().err
    assert f"the disk of {out} is full; nothing finished is lost." in said and "Traceback" not in said
    assert call(*GSM8K, "task.benchmarks=[]", "--output-dir", str(out)) == 0
    assert [run["loss"] for run in read(out)["runs"]] == [run["loss"] for run in read(folder)["runs"]]


def test_a_local_model_and_a_local_copy_of_a_hub_data_set(folder, tmp_path):
    from datasets import Dataset

    rows = [{"query": f"What is {k} + {k}?", "response": f"The answer is: {2 * k}", "type": "t"} for k in range(80)]
    (tmp_path / "MetaMathQA" / "data").mkdir(parents=True)
    Dataset.from_list(rows).to_parquet(str(tmp_path / "MetaMathQA" / "data" / "train-00000-of-00001.parquet"))
    words = ["run", "gsm8k", *SMALL, f"model.name={folder / RUNS[0] / 'model'}", "training.steps=2"]
    words += [f"task.data={tmp_path / 'MetaMathQA'}", "task.share=0.5", "task.shuffle_seed=42", "task.max_rows=0"]
    words += ["task.held_out_share=0.1", "task.benchmarks=[]", "training.save_steps=0"]
    assert call(*words, "--output-dir", str(tmp_path / "out")) == 0
    document = read(tmp_path / "out")
    # Half of 80 rows, a tenth of them held out: two for validation, two for the test.
    assert [document["task"][f"{name}_rows"] for name in ("train", "validation", "test")] == [36, 2, 2]
    muon, adamw = document["runs"]
    assert muon["loss"][0] == adamw["loss"][0] and muon["initial_weights"] == adamw["initial_weights"]


def test_mmlu(tmp_path):
    assert call("run", "mmlu", *SMALL, "--output-dir", str(tmp_path / "out")) == 0
    document = read(tmp_path / "out")
    scores = [run["eval"]["benchmarks"]["mmlu"] for run in document["runs"]]
    assert all(entry["n"] == 16 and "loglikelihood" in entry for entry in scores)
    assert document["comparison"]["benchmarks"]["mmlu"]["published"]["muon"] == 0.678


def test_mbpp_trains_without_and_scores_with_permission(tmp_path, capsys):
    words = ["run", "mbpp", *SMALL, "task.eval_rows=4", "--output-dir", str(tmp_path / "out")]
    assert call(*words) == 0
    said = capsys.readouterr().err
    assert "mbpp is not scored: it runs generated programs" in said
    before = read(tmp_path / "out")
    assert before["complete"] and before["comparison"]["benchmarks"]["mbpp"]["measured"] == {}
    assert "was not scored" in (tmp_path / "out" / "report.html").read_text()
    assert call(*words, "--allow-code-execution", "--json") == 0
    after = json.loads(capsys.readouterr().out)
    assert [run["loss"] for run in after["runs"]] == [run["loss"] for run in before["runs"]]
    assert {row["n"] for row in after["comparison"]["benchmarks"]["mbpp"]["measured"].values()} == {4}


def test_memory_is_predicted_for_both_optimizers(tmp_path):
    out = tmp_path / "out"
    assert call("run", "memory", *SMALL, "--output-dir", str(out)) == 0
    memory = read(out)["comparison"]["memory"]
    muon, adamw = memory["predicted"]["muon"], memory["predicted"]["adamw"]
    assert muon["peak_bytes"] > 0 and muon["parts"]["states"] < adamw["parts"]["states"]
    assert memory["measured"] == {} and "Not measured" in memory["measured_note"]
    assert "Peak memory of a rank" in (out / "report.html").read_text()


def test_a_memory_recipe_without_its_gpus_predicts_alone(tmp_path, monkeypatch):
    import hf_muon.cli.training.memory as memory

    parts = {"weights": 2**30, "gathered": 0, "gradients": 0, "states": 2**31, "activations": 0, "temporaries": 0}
    fake = {"peak_bytes": 3 * 2**30, "parts": parts, "phase": "step", "world_size": 8, "micro_batch": 4, "seq_len": 9}
    monkeypatch.setattr(memory, "has_devices", lambda recipe: False)
    import hf_muon.cli.training.search as search

    monkeypatch.setattr(search, "predictions", lambda recipe: {"muon": fake, "adamw": fake})
    out = tmp_path / "out"
    assert call("run", "memory", "--output-dir", str(out)) == 0
    document = read(out)
    assert document["complete"] and document["runs"] == []
    assert document["comparison"]["memory"]["published"]["adamw_gib"] == 34.5
    page = (out / "report.html").read_text()
    assert "34.5 GiB" in page and "that needs 8 GPUs" in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["gsm8k", "--tiny", "model.name=no/such-model"],
            "model.name must be a local folder, or a hub id while the hub",
        ),
        (
            ["gsm8k", "--tiny", "task.data=no/such-data"],
            "task.data must be a file, a folder, or a hub id while the hub",
        ),
        (["gsm8k", "--tiny", "task.eval_data=nowhere.jsonl"], "task.eval_data: nowhere.jsonl must be a readable file"),
        (["gsm8k", "--tiny", "task.data=nowhere.jsonl"], "'nowhere.jsonl' does not exist"),
        (["gsm8k", "--tiny", "task.max_length=20"], "task.max_length must leave room for an answer in every split"),
        (["gsm8k"], "training.num_processes must not exceed the GPUs; got 4 for 0. Choose a variant"),
        (["gsm8k", "variant=smol"], "variant must be one of qwen2.5-0.5b, qwen2.5-3b, smollm2; got 'smol'."),
        (["gsm8k", "--tiny", "training.launch=ddpp"], "training.launch must be a file or one of none"),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(words, message, tmp_path, monkeypatch, capsys):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.chdir(tmp_path)
    assert call("run", *words) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert message in said[-1] and said[-1].startswith("hf-muon: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_two_processes_train_as_one_and_a_killed_worker_is_told(folder, tmp_path, capsys):
    """The driver launches Accelerate; rows 2 x 2 per step are the rows of one process with 4."""
    from hf_muon.cli.errors import RunError
    from hf_muon.cli.recipe import find_recipe, load_recipe
    from hf_muon.cli.training.launched import train_launched
    from hf_muon.cli.training.output_folder import open_folder
    from hf_muon.cli.training.single_run import RunSpec

    (tmp_path / "cpu.yaml").write_text(CPU_PROCESSES)
    words = [*GSM8K[3:], f"training.launch={tmp_path / 'cpu.yaml'}", "training.batch_size=2", "task.benchmarks=[]"]
    recipe = load_recipe(find_recipe("gsm8k"), words, tiny=True)
    open_folder(tmp_path / "out", recipe)
    spec = RunSpec("muon", 1e-2, 42)

    def kill_a_worker(step, loss):
        import psutil

        if step == 5:
            # The launcher is a child of this process, the workers are its children.
            for child in psutil.Process().children(recursive=True):
                if "hf_muon.cli.launch" in " ".join(child.cmdline()) and child.ppid() != os.getpid():
                    child.kill()
                    return

    with pytest.raises(RunError, match=r"the worker processes ended with code .* continues from the last checkpoint"):
        train_launched(recipe, tmp_path / "out", spec, kill_a_worker)
    assert (tmp_path / "out" / spec.name / "checkpoint-4" / "watch.json").is_file()
    steps = []
    result = train_launched(recipe, tmp_path / "out", spec, lambda step, loss: steps.append(step))
    assert steps == [5, 6, 7, 8]
    alone = next(run for run in read(folder)["runs"] if run["name"] == spec.name)
    assert result["initial_weights"] == alone["initial_weights"]
    # Mean of two halves against one mean: float32 rounding, grown over 8 steps of Muon.
    assert result["loss"] == pytest.approx(alone["loss"], rel=2e-3)
    assert result["eval"]["validation"]["loss"] == pytest.approx(alone["eval"]["validation"]["loss"], rel=2e-3)
