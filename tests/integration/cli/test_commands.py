# SPDX-License-Identifier: Apache-2.0
"""Commands around a run: help, recipes, params, env, and every kind of bad input."""

import json
import subprocess
import sys

import pytest

from hf_muon.cli.app import main

TOTALS = {
    "Qwen2.5-0.5B": 0.494e9,
    "Qwen2.5-3B": 3.09e9,
    "Qwen2.5-7B": 7.6e9,
    "Llama-3-8B": 8.03e9,
    "SmolLM2-135M": 134.5e6,
    "Moonlight-16B-A3B": 16.0e9,
    "Mixtral-8x7B": 46.7e9,
}


def call(*words):
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    return stop.value.code or 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "demmo"], "'demmo' is not a recipe. Did you mean 'demo'?"),
        (["run", "demo", "training.stepz=3"], "Did you mean 'training.steps'?"),
        (["run", "demo", "training.steps=x"], "training.steps must be a whole number; got 'x'."),
        (["run", "--tinny"], "No such option: --tinny"),
        (["run", "demo", "task.data=nowhere"], "task.data must be a shipped data set (gsm8k) or a local folder"),
        (["run", "demo", "search.seeds=[-1]"], "search.seeds must lie in 0 to 2**32 - 1; got [-1]."),
        (["run", "demo", "adamw.adam_beta1=2"], "adamw.adam_beta1 must lie in [0, 1); got 2.0."),
        (["run", "demo", "training.weight_decay=.inf"], "training.weight_decay must be finite and not negative"),
        (["run", "demo", "training.threads=100000"], "training.threads must be at most 1024; got 100000."),
        (["run", "demo", "optimizer.betas=0.9"], "betas must be two numbers; got 0.9."),
        (["run", "demo", 'optimizer.include=["q{1,2}"]'], "optimizer.include and exclude must hold no comma"),
        (["run", "addition", "--tiny", "optimizer.exclude=zzz"], "exclude must match a trainable parameter"),
        (["run", "addition", "--tiny", "optimizer.exclude=.*"], "must have at least one tensor on Muon; got 0 of"),
        (["run", "demo", "--output-dir", "a" * 300], "--output-dir must be writable"),
        (["rn"], "No such command 'rn'"),
        (["params", "SmolLM2-135M", "--include", "zzz"], "include must match a trainable parameter; got 'zzz'"),
        (["params"], "Missing argument 'MODEL'"),
        (["params", "Qwen2.5-3C"], "got 'Qwen2.5-3C'. Did you mean 'Qwen2.5-3B'?"),
        (["params", "SmolLM2-135M", "--matrix-split", "fuse"], "matrix_split must be one of"),
        (["params", "SmolLM2-135M", "--include", "("], "include must hold regular expressions"),
    ],
)
def test_bad_input_is_one_line_with_code_2_and_writes_nothing(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert call(*words) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert said.err.startswith("hf-muon: ") and message in said.err
    assert not list(tmp_path.iterdir())


def test_a_folder_without_config_is_named(tmp_path, capsys):
    assert call("params", str(tmp_path)) == 2
    assert "has none. Give a saved model." in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{")
    assert call("params", str(tmp_path)) == 2
    assert "must be a JSON file" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"model_type": "no-such-thing"}')
    assert call("params", str(tmp_path)) == 2
    assert "got 'no-such-thing'" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert call("params", str(tmp_path / "config.json")) == 2
    assert "MODEL must be a folder" in capsys.readouterr().err


def test_an_output_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("kept")
    assert call("run", "demo", "--output-dir", str(tmp_path / "file" / "below")) == 2
    assert "--output-dir must be writable" in capsys.readouterr().err
    assert call("run", "demo", "--output-dir", str(tmp_path / "file")) == 2
    assert "--output-dir must be a folder" in capsys.readouterr().err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("kept")
    assert call("run", "demo", "--output-dir", str(tmp_path / "full")) == 2
    assert "holds other files" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "full", "thesis.txt"]


def test_a_broken_row_is_named_by_its_line(tmp_path, capsys):
    data = tmp_path / "data"
    data.mkdir()
    assert call("run", "demo", f"task.data={data}", "--output-dir", str(tmp_path / "out")) == 2
    assert "train.jsonl is missing" in capsys.readouterr().err
    for split in ("train", "validation", "test"):
        (data / f"{split}.jsonl").write_text('{"text": "a"}\n{"txt": "b"}\n')
    assert call("run", "demo", f"task.data={data}", "--output-dir", str(tmp_path / "out")) == 2
    assert "train.jsonl:2 must be a JSON object" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_debug_shows_the_traceback(capsys):
    assert call("run", "demmo", "--debug") == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_failure_while_running_is_code_1(tmp_path, monkeypatch, capsys):
    import hf_muon.cli.training.search as search

    def fail(*_):
        raise RuntimeError("the device\nis gone")

    monkeypatch.setattr(search, "build_task", fail)
    assert call("run", "demo", "--output-dir", str(tmp_path / "out")) == 1
    assert "hf-muon: the device is gone Run again with --debug" in capsys.readouterr().err


def test_recipes_as_json(capsys):
    assert call("recipes", "--json") == 0
    listed = json.loads(capsys.readouterr().out)["recipes"]
    assert {"demo", "addition"} <= {entry["name"] for entry in listed}
    assert call("recipes") == 0
    assert "addition" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": "abc"}, "must hold a valid llama configuration"),
        ({"hidden_size": 30, "num_attention_heads": 7}, "must hold a valid llama configuration"),
        ({"model_type": "no_such"}, "must name a model_type that transformers knows; got 'no_such'"),
    ],
)
def test_a_folder_with_a_broken_config_is_bad_usage(config, message, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    assert call("params", str(tmp_path)) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and message in said.err


@pytest.mark.parametrize("name", sorted(TOTALS))
def test_built_in_configurations_have_the_published_size(name, capsys):
    assert call("params", name, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    total = document["muon"]["elements"] + document["adamw"]["elements"]
    # Published totals have two or three digits.
    assert total == pytest.approx(TOTALS[name], rel=6e-3)
    assert document["model"] == name
    assert document["muon"]["tensors"] + document["adamw"]["tensors"] == len(document["parameters"])
    assert set(document["parameters"][0]) == {"name", "shape", "algorithm", "rule"}


def test_names_in_any_case_with_an_organisation_and_patterns(capsys):
    words = ["params", "HuggingFaceTB/smollm2-135m", "--exclude", r"mlp\.", "--json"]
    assert call(*words) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["model"] == "SmolLM2-135M"
    assert all(row["algorithm"] == "adamw" for row in document["parameters"] if "mlp." in row["name"])
    assert document["muon"]["tensors"] == 30 * 4
    assert call("params", "smollm2-135m") == 0
    assert "model.layers.{0-29}.mlp.up_proj.weight" in capsys.readouterr().out


def test_a_saved_model_is_a_model(tmp_path, capsys):
    from transformers import GPT2Config

    GPT2Config(n_embd=16, n_layer=1, n_head=2, architectures=["GPT2LMHeadModel"]).save_pretrained(tmp_path)
    assert call("params", str(tmp_path), "--json") == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["parameters"]}
    assert rows["transformer.wte.weight"]["algorithm"] == "adamw"
    assert rows["transformer.h.0.mlp.c_fc.weight"]["algorithm"] == "muon"


def test_env(capsys):
    assert call("env", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert {"versions", "devices", "backends", "kernels"} <= set(document)
    assert document["backends"]["optim=dmuon registered"] is True
    assert all(choice["used"] and choice["why"] for choice in document["kernels"].values())
    assert call("env") == 0
    assert "newton-schulz" in capsys.readouterr().out


def test_help_imports_no_torch():
    code = (
        "import sys\nfrom hf_muon.cli.app import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules), 'heavy import'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "run" in done.stdout
