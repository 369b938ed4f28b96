# SPDX-License-Identifier: Apache-2.0
"""`hf-muon eval` from its words to its exit code."""

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from hf_muon.cli.app import main
from hf_muon.cli.training.text import train_tokenizer

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "tests" / "data" / "evaluation"
GSM8K = str(ROOT / "recipes" / "data" / "gsm8k" / "test.jsonl")
MMLU, MBPP = str(DATA / "mmlu.csv"), str(DATA / "mbpp.jsonl")


def call(*words):
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    return stop.value.code or 0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer([Path(GSM8K).read_text()[:20000]], 400)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.5, **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_ALLOW_CODE_EVAL", raising=False)
    monkeypatch.chdir(tmp_path)


def test_a_model_is_scored_and_the_same_command_continues(model, tmp_path, capsys):
    words = ["eval", "mmlu", "--model", model, "--data", MMLU, "--limit", 12, "--seed", 2, "--batch-size", 5, "--json"]
    assert call(*words) == 0
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert document["task"] == "mmlu" and document["n"] == 12 and document["model"] == model
    assert "mmlu: 5 of 12 rows" in said.err
    samples = tmp_path / document["samples_file"]
    written = samples.read_bytes()
    assert len(written.splitlines()) == 12
    assert call(*words) == 0
    assert json.loads(capsys.readouterr().out) == document and samples.read_bytes() == written
    assert call(*words[:-1]) == 0
    table = capsys.readouterr().out
    assert "by log-likelihood of the letters" in table and "published: Moonlight-16B-A3B, Muon" in table
    assert "67.8%" in table and "partly measure" in table


def test_predictions_need_no_model(tmp_path, capsys):
    rows = [json.loads(line) for line in Path(GSM8K).read_text().splitlines()]
    given = tmp_path / "given.jsonl"
    given.write_text("".join(json.dumps({"id": i, "completion": row["answer"]}) + "\n" for i, row in enumerate(rows)))
    assert call("eval", "gsm8k", "--predictions", given, "--data", GSM8K, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["n"], document["correct"], document["score"]) == (120, 120, 1.0)
    assert call("eval", "gsm8k", "--predictions", given, "--data", GSM8K, "--limit", 9, "--seed", 1, "--json") == 0
    assert json.loads(capsys.readouterr().out)["n"] == 9
    assert call("eval", "gsm8k", "--predictions", given, "--data", GSM8K) == 0
    assert "given completions" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["given.jsonl"]


def test_programs_run_when_allowed(tmp_path, monkeypatch, capsys):
    rows = [json.loads(line) for line in Path(MBPP).read_text().splitlines()[:3]]
    given = tmp_path / "given.jsonl"
    given.write_text("".join(json.dumps({"id": row["task_id"], "completion": row["code"]}) + "\n" for row in rows))
    words = ["eval", "mbpp", "--predictions", given, "--data", MBPP, "--limit", 3, "--json"]
    assert call(*words) == 2
    said = capsys.readouterr()
    assert said.out == "" and "needs --allow-code-execution" in said.err and said.err.count("\n") == 1
    assert call(*words, "--allow-code-execution") == 0
    assert json.loads(capsys.readouterr().out)["correct"] == 3
    monkeypatch.setenv("HF_ALLOW_CODE_EVAL", "1")
    assert call(*words) == 0
    assert json.loads(capsys.readouterr().out)["correct"] == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["gsmk", "--model", "m"],
            "TASK must be one of mbpp, mbpp_plus, mmlu, gsm8k; got 'gsmk'. Did you mean 'gsm8k'?",
        ),
        (["gsm8k"], "eval must have --model M, or --predictions FILE"),
        (["gsm8k", "--model", "m", "--predictions", "p"], "either --model or --predictions; got both."),
        (["gsm8k", "--model", "m", "--limit", "-1"], "--limit must be 0 or more; got -1."),
        (["gsm8k", "--model", "m", "--batch-size", "0"], "--batch-size must be 1 or more; got 0."),
        (["gsm8k", "--model", "m", "--dtype", "int8"], "--dtype must be one of auto, float32"),
        (["gsm8k", "--model", "m", "--data", GSM8K, "--device", "tpu9"], "--device must be one that torch has here"),
        (["gsm8k", "--model", "m", "--harness", "x"], "--harness must be one of builtin, lm-eval; got 'x'."),
        (["gsm8k", "--model", "m", "--harness", "lm-eval"], "it is not installed. Run: pip install"),
        (
            ["gsm8k", "--model", "m", "--harness", "lm-eval", "--data", GSM8K],
            "--data must be left out with --harness lm",
        ),
        (["mmlu", "--predictions", "p", "--mode", "loglikelihood"], "--mode must be left out with --predictions"),
        (
            ["gsm8k", "--predictions", "p", "--max-new-tokens", "4"],
            "--max-new-tokens must be left out with --predictions",
        ),
        (
            ["mmlu", "--model", "m", "--harness", "lm-eval", "--mode", "loglikelihood"],
            "--mode must be left out with --har",
        ),
        (["gsm8k", "--model", "m", "--data", "nowhere.jsonl"], "nowhere.jsonl must be a readable file"),
        (["gsm8k", "--model", "m", "--data", MMLU], "mmlu.csv:1 must be a JSON object"),
        (["mmlu", "--model", "m", "--data", GSM8K], "must have the column 'choice0'"),
        (
            ["gsm8k", "--model", "nowhere", "--data", GSM8K],
            "--model must be a folder with a saved causal language model",
        ),
        (["gsm8k", "--predictions", "nowhere", "--data", GSM8K], "nowhere must be a readable file"),
        (["mbpp", "--model", "m", "--data", MBPP], "mbpp runs the programs that the model writes"),
    ],
)
def test_bad_words_are_one_line_with_code_2_and_write_nothing(words, message, tmp_path, capsys):
    assert call("eval", *words) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert message in said.err and not list(tmp_path.iterdir())
