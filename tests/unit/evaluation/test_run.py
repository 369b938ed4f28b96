# SPDX-License-Identifier: Apache-2.0
"""Whole evaluations: the document, stopping and continuing, completions made elsewhere, lm-eval's command and file."""

import json
import math
import random
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from evaluation.harness import evaluate_with_lm_eval, lm_eval_command, read_lm_eval
from evaluation.rows import DataError
from evaluation.run import evaluate, evaluate_predictions
from evaluation.samples import correctness, settings_file
from evaluation.tasks import load_rows
from hf_muon.cli.training.text import train_tokenizer

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "tests" / "data" / "evaluation"
GSM8K = ROOT / "recipes" / "data" / "gsm8k" / "test.jsonl"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([row.prompt for row in load_rows("gsm8k", GSM8K, limit=30)], 400)


@pytest.fixture
def model(tokenizer):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.5, **sizes))


class Stopped(Exception):
    pass


def stop_after(rows):
    def progress(finished, total):
        if finished >= rows:
            raise Stopped

    return progress


def lines(path):
    return sorted(path.read_text().splitlines())


@pytest.mark.parametrize("mode", ["published", "loglikelihood"])
def test_a_stopped_run_continues_to_the_same_result(mode, model, tokenizer, tmp_path):
    rows = load_rows("mmlu", DATA / "mmlu.csv", limit=20, seed=1)
    options = {"mode": mode, "batch_size": 4}
    whole = evaluate("mmlu", model, tokenizer, rows, samples_file=tmp_path / "whole.jsonl", **options)
    with pytest.raises(Stopped):
        evaluate(
            "mmlu", model, tokenizer, rows, samples_file=tmp_path / "part.jsonl", progress=stop_after(8), **options
        )
    assert len(lines(tmp_path / "part.jsonl")) == 8
    with (tmp_path / "part.jsonl").open("a") as file:
        file.write('{"id": 3, "comple')  # killed while it wrote
    seen = []
    again = evaluate(
        "mmlu",
        model,
        tokenizer,
        rows,
        samples_file=tmp_path / "part.jsonl",
        mode=mode,
        batch_size=5,
        progress=lambda finished, total: seen.append(finished),
    )
    assert seen == [8, 13, 18, 20]
    assert again | {"samples_file": ""} == whole | {"samples_file": ""}
    kept = {row["id"]: row["completion"] for row in map(json.loads, lines(tmp_path / "part.jsonl"))}
    assert kept == {row["id"]: row["completion"] for row in map(json.loads, lines(tmp_path / "whole.jsonl"))}
    assert set(correctness(tmp_path / "part.jsonl").values()) <= {True, False}


def test_the_document_has_the_agreed_keys(model, tokenizer, tmp_path):
    rows = load_rows("mmlu", DATA / "mmlu.csv")
    document = evaluate("mmlu", model, tokenizer, rows, samples_file=tmp_path / "s.jsonl", model_name="tiny")
    assert {"task", "model", "n", "correct", "score", "stderr", "settings", "samples_file"} <= set(document)
    share = document["score"]
    assert document["n"] == 48 and share == document["correct"] / 48 and document["model"] == "tiny"
    assert document["stderr"] == pytest.approx(math.sqrt(share * (1 - share) / 48))
    assert document["correct"] == sum(correctness(tmp_path / "s.jsonl").values())
    assert document["settings"]["max_new_tokens"] == 10 and document["settings"]["few_shot"] == 0
    assert "partly measure" in document["note"] and set(document["loglikelihood"]) == {"correct", "score", "stderr"}
    assert json.loads(json.dumps(document)) == document
    # Published: 0.4 points for 14,042 rows.
    assert document["published"]["muon"]["stderr"] == pytest.approx(0.004, abs=2e-4)
    # The samples are predictions that score the same.
    given = evaluate_predictions("mmlu", rows, tmp_path / "s.jsonl")
    assert given["correct"] == document["correct"] and given["model"] is None


def test_another_run_is_not_mixed_in(model, tokenizer, tmp_path):
    rows = load_rows("mmlu", DATA / "mmlu.csv", limit=4)
    path = tmp_path / "s.jsonl"
    evaluate("mmlu", model, tokenizer, rows, samples_file=path)
    before = path.read_bytes()
    for message, change in (
        ("holds a run with mode 'published', not 'loglikelihood'", {"mode": "loglikelihood"}),
        ("holds a run with max_new_tokens 10, not 3", {"max_new_tokens": 3}),
        ("holds a run with rows 4, not 3", {"rows": rows[:3]}),
    ):
        with pytest.raises(DataError, match=message):
            evaluate("mmlu", model, tokenizer, change.pop("rows", rows), samples_file=path, **change)
    with torch.no_grad():
        model.model.norm.weight.add_(1e-3)
    with pytest.raises(DataError, match=r"holds a run with weights '.*Give another --samples FILE, or remove it"):
        evaluate("mmlu", model, tokenizer, rows, samples_file=path)
    assert path.read_bytes() == before
    settings_file(path).unlink()
    with pytest.raises(DataError, match=r"must have s\.jsonl\.settings\.json beside it"):
        evaluate("mmlu", model, tokenizer, rows, samples_file=path)
    with pytest.raises(DataError, match="--samples must be a file that can be written"):
        evaluate("mmlu", model, tokenizer, rows, samples_file=path / "below")


def test_a_foreign_line_is_named(model, tokenizer, tmp_path):
    rows = load_rows("mmlu", DATA / "mmlu.csv", limit=2)
    path = tmp_path / "s.jsonl"
    evaluate("mmlu", model, tokenizer, rows, samples_file=path)
    path.write_text(path.read_text() + '{"id": 77, "correct": true}\n')
    with pytest.raises(DataError, match=r"s\.jsonl:3 must hold a row of this run; got id 77"):
        evaluate("mmlu", model, tokenizer, rows, samples_file=path)


def test_bad_words(model, tokenizer, tmp_path):
    rows = load_rows("gsm8k", GSM8K, limit=1)
    for message, words in (
        (
            r"mode must be published, or loglikelihood for mmlu; got 'loglikelihood' for gsm8k",
            {"mode": "loglikelihood"},
        ),
        ("--batch-size must be 1 or more; got 0", {"batch_size": 0}),
    ):
        with pytest.raises(DataError, match=message):
            evaluate("gsm8k", model, tokenizer, rows, samples_file=tmp_path / "s.jsonl", **words)
    with pytest.raises(DataError, match="gsm8k must have at least one row"):
        evaluate("gsm8k", model, tokenizer, [], samples_file=tmp_path / "s.jsonl")
    assert not list(tmp_path.iterdir())


def test_programs_are_scored_alike_however_many_run_at_once(tmp_path, monkeypatch):
    rows = load_rows("mbpp", DATA / "mbpp.jsonl", limit=4)
    codes = [json.loads(line)["code"] for line in (DATA / "mbpp.jsonl").read_text().splitlines()[:4]]
    codes[1] = "def similar_elements(a, b): return ()"
    given = tmp_path / "p.jsonl"
    order = random.sample(range(4), 4)
    given.write_text("".join(json.dumps({"id": rows[i].id, "completion": codes[i]}) + "\n" for i in order))
    for workers in (1, 4):
        monkeypatch.setattr("evaluation.run._workers", lambda workers=workers: workers)
        path = tmp_path / f"{workers}.jsonl"
        document = evaluate_predictions("mbpp", rows, given, samples_file=path, allow_code_execution=True)
        assert (document["n"], document["correct"], document["samples_file"]) == (4, 3, str(path))
    assert (tmp_path / "1.jsonl").read_text() == (tmp_path / "4.jsonl").read_text()
    assert correctness(path) == {"1": True, "2": False, "3": True, "4": True}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[:-2], r"p\.jsonl must hold every row; 2 of 5 are missing, first 3\."),
        (lambda rows: [*rows, rows[0]], r"p\.jsonl:6 must hold each id once; got 0 again\."),
        (lambda rows: [*rows, '{"id": 9, "completion": ""}'], r"p\.jsonl:6 must hold an id of the data; got 9\."),
        (lambda rows: [rows[0], "{", *rows[2:]], r"p\.jsonl:2 must be a JSON object; got '\{'\."),
        (lambda rows: [rows[0], '{"id": 1}', *rows[2:]], r"p\.jsonl:2 must hold 'id' and a text 'completion'"),
        (lambda rows: ['{"id": true, "completion": ""}', *rows[1:]], r"p\.jsonl:1 must hold 'id' and a text"),
        (lambda rows: [], "must hold at least one row"),
    ],
)
def test_bad_predictions_are_one_sentence_and_write_nothing(change, message, tmp_path):
    rows = load_rows("gsm8k", GSM8K, limit=5)
    good = [json.dumps({"id": row.id, "completion": f"#### {row.reference}"}) for row in rows]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(good))
    assert evaluate_predictions("gsm8k", rows, path)["score"] == 1.0
    path.write_text("\n".join(change(good)))
    with pytest.raises(DataError, match=message):
        evaluate_predictions("gsm8k", rows, path, samples_file=tmp_path / "out.jsonl")
    assert [file.name for file in tmp_path.iterdir()] == ["p.jsonl"]


def test_ids_of_the_data_that_were_not_asked_for_may_occur(tmp_path):
    rows = load_rows("gsm8k", GSM8K, limit=6)
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"id": str(row.id), "completion": "none"}) + "\n" for row in rows))
    assert evaluate_predictions("gsm8k", rows[:2], path, known=[row.id for row in rows])["n"] == 2


def test_lm_eval_as_a_second_opinion(tmp_path, monkeypatch):
    command = lm_eval_command("mbpp", "M", tmp_path, limit=7, dtype="float32", device="cpu")
    text = " ".join(command)
    assert "-m lm_eval --model hf --model_args pretrained=M,dtype=float32 --tasks mbpp --num_fewshot 0" in text
    assert "--limit 7" in text and text.endswith("--device cpu --confirm_run_unsafe_code")
    with pytest.raises(DataError, match=r'it is not installed\. Run: pip install "hf-muon\[eval\]"'):
        evaluate_with_lm_eval("gsm8k", "M")
    scores = {"exact_match,strict-match": 0.25, "exact_match_stderr,strict-match": 0.05}
    results = {"results": {"gsm8k": scores}, "n-samples": {"gsm8k": {"original": 1319, "effective": 20}}}
    document = read_lm_eval("gsm8k", "M", results)
    assert (document["n"], document["correct"], document["score"], document["stderr"]) == (20, 5, 0.25, 0.05)
    with pytest.raises(RuntimeError, match="must report acc,none of mmlu; got nothing"):
        read_lm_eval("mmlu", "M", results)

    # A module of that name that writes a result file where it was told to.
    (tmp_path / "lm_eval.py").write_text(
        "import json, pathlib, sys\nfolder = pathlib.Path(sys.argv[sys.argv.index('--output_path') + 1]) / 'M'\n"
        f"folder.mkdir()\n(folder / 'results_1.json').write_text(json.dumps({results!r}))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert evaluate_with_lm_eval("gsm8k", "M") == document
    (tmp_path / "lm_eval.py").write_text("raise SystemExit(3)")
    with pytest.raises(RuntimeError, match="it left with 3 and wrote 0"):
        evaluate_with_lm_eval("gsm8k", "M")
