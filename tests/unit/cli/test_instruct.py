# SPDX-License-Identifier: Apache-2.0
"""Instruction rows: layouts, bad files, masking, splits; nothing is trained here."""

import json
import random

import pytest

from hf_muon.cli.errors import RunError, UsageError
from hf_muon.cli.recipe import find_recipe, load_recipe
from hf_muon.cli.recipe.loading import write_recipe
from hf_muon.cli.resources import load_evaluation
from hf_muon.cli.training import checkpoints, launched
from hf_muon.cli.training.instruct import IGNORED, data_files, encode_pair, has_target, shuffled, split_off
from hf_muon.cli.training.rows import LAYOUTS, layout_of, read_pairs, shipped_data
from hf_muon.cli.training.single_run import RunSpec
from hf_muon.cli.training.text import train_tokenizer

HEAD = "### Instruction:\nq?\n\n"
MMLU = "### Instruction:\nq?\nA. w\nB. x\nC. y\nD. z\nAnswer with the letter of the correct choice.\n\n### Response:\n"


@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        ({"instruction": "q?", "input": "", "output": "a"}, f"{HEAD}### Response:\n", "a"),
        ({"instruction": "q?", "input": "i", "output": "a"}, f"{HEAD}### Input:\ni\n\n### Response:\n", "a"),
        ({"query": "q?", "response": "a", "type": "t", "original_question": "o"}, f"{HEAD}### Response:\n", "a"),
        ({"question": "q?", "answer": "a\n#### 3"}, f"{HEAD}### Response:\n", "a\n#### 3"),
        ({"question": "q?", "choices": list("wxyz"), "answer": 2, "subject": "s"}, MMLU, "C"),
        ({"question": "q?", **{f"choice{k}": c for k, c in enumerate("wxyz")}, "answer": "3"}, MMLU, "D"),
        (
            {"text": "q?", "code": "def f(): pass", "test_list": ["assert f() is None"], "task_id": 3},
            "### Instruction:\nq?\nassert f() is None\n\n### Response:\n",
            "def f(): pass",
        ),
    ],
)
def test_every_public_layout_becomes_the_published_prompt(row, prompt, answer):
    assert layout_of(row, "here")(row) == (prompt, answer)


def test_the_shipped_rows_train_on_the_prompts_that_the_evaluation_asks():
    load_rows = load_evaluation("tasks").load_rows
    for name, file in (("gsm8k", "test.jsonl"), ("mmlu", "test.csv"), ("mbpp", "test.jsonl")):
        path = shipped_data()[name] / file
        rows = load_rows(name, path)
        assert [row.prompt for row in rows] == [pair["prompt"] for pair in read_pairs(path)]
        trained = {pair["prompt"] for pair in read_pairs(data_files(name)["train"])}
        assert len(rows) >= 40 and not trained & {row.prompt for row in rows}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"question": "q", "answer": "a"}\n\n{"question": "q"\n', "a.jsonl:3 must be a JSON object"),
        ("a.jsonl", '{"question": "q", "answer": "a"}\n[1]\n', "a.jsonl:2 must be an object with named columns"),
        ("a.jsonl", '{"question": "q", "reply": "a"}\n', "a.jsonl:1 must have the columns of one known layout"),
        ("a.jsonl", '{"question": "q", "answer": 3}\n', "a.jsonl:1 must hold text in 'answer'; got 3"),
        ("a.jsonl", "\n\n", "a.jsonl must hold at least one row; got none"),
        ("a.json", "[]", "a.json must hold at least one row; got none"),
        ("a.json", '[{"instruction": "q", "output": "a"},\n{"x": }]', "a.json:2 must be JSON"),
        ("a.csv", "question,choice0,choice1,choice2,choice3,answer\nq,a,b,c,d,0\nq,a,b\n", "a.csv:3 must have 6 col"),
        ("a.csv", "question,choice0,choice1,choice2,choice3,answer\nq,a,b,c,d,E\n", "a.csv:2 must hold answer as an"),
        ("a.csv", "q,c0\nq,a\n", "a.csv:2 must have the columns of one known layout"),
    ],
)
def test_a_bad_file_is_one_sentence_with_its_line(name, text, message, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError) as error:
        read_pairs(tmp_path / name)
    assert message in str(error.value)


def test_bytes_that_are_no_text_and_names_that_are_no_data(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match=r"must be a readable .jsonl file"):
        read_pairs(tmp_path / "a.jsonl")
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(UsageError, match=r"must be a file of .jsonl, .json, .csv, .parquet"):
        data_files(str(tmp_path / "a.txt"))
    with pytest.raises(UsageError, match=r"shipped data set .*gsm8k.* does not exist"):
        data_files("nowhere.jsonl")
    (tmp_path / "test.jsonl").write_text("{}")
    with pytest.raises(UsageError, match=r"must hold train.jsonl"):
        data_files(str(tmp_path))
    assert data_files("meta-math/MetaMathQA") == {}


@pytest.fixture(scope="module")
def tokenizer():
    texts = [pair["prompt"] + pair["answer"] for pair in read_pairs(data_files("gsm8k")["train"], 80)]
    return train_tokenizer(texts, 600)


class WithBos:
    """A tokenizer that puts a token in front, as Llama's does: the prompt is one longer than its text."""

    def __init__(self, inner, bos):
        self.inner, self.bos, self.eos_token_id = inner, bos, inner.eos_token_id

    def __call__(self, text):
        return {"input_ids": [self.bos, *self.inner(text)["input_ids"]]}


@pytest.mark.parametrize("with_bos", [False, True])
def test_exactly_the_answer_counts(tokenizer, with_bos):
    encoder = WithBos(tokenizer, 7) if with_bos else tokenizer
    for pair in random.sample(read_pairs(data_files("gsm8k")["train"]), 20):
        row = encode_pair(pair, encoder, 4096, append_eos=True)
        counted = [label for label in row["labels"] if label != IGNORED]
        assert counted[-1] == tokenizer.eos_token_id
        # The rows end the prompt with a line break and begin the answer with a letter: no token joins the two.
        assert tokenizer.decode(counted[:-1]) == pair["answer"]
        masked = [i for i, label in zip(row["input_ids"], row["labels"], strict=True) if label == IGNORED]
        assert masked == encoder(pair["prompt"])["input_ids"]


def test_a_token_over_the_border_counts_and_cut_answers_are_noticed(tokenizer):
    # "12" alone is two digits; the border lies inside "the", which is one token.
    row = encode_pair({"prompt": "a th", "answer": "e"}, tokenizer, 64, append_eos=False)
    joined = tokenizer("a the")["input_ids"]
    assert row["input_ids"] == joined and row["labels"][-1] == joined[-1]
    pair = read_pairs(data_files("gsm8k")["train"], 1)[0]
    prompt = len(tokenizer(pair["prompt"])["input_ids"])
    assert not has_target(encode_pair(pair, tokenizer, prompt, append_eos=True)["labels"])
    assert has_target(encode_pair(pair, tokenizer, prompt + 1, append_eos=True)["labels"])


def test_rows_are_chosen_and_split_as_published():
    from datasets import Dataset

    recipe = load_recipe(find_recipe("gsm8k"))
    rows = Dataset.from_dict({"prompt": [str(k) for k in range(4000)], "answer": ["a"] * 4000})
    used = shuffled(recipe, rows)
    assert used["prompt"] == rows.shuffle(seed=42).select(range(400))["prompt"]
    parts = split_off(recipe, used)
    expected = used.train_test_split(test_size=0.05, seed=42)
    assert parts["train"]["prompt"] == expected["train"]["prompt"]
    assert [*parts["validation"]["prompt"], *parts["test"]["prompt"]] == list(expected["test"]["prompt"])
    with pytest.raises(UsageError, match="at least two held-out ones; got 10 rows"):
        split_off(recipe, rows.select(range(10)))


def test_the_published_settings_stand_in_the_recipes():
    settings = load_evaluation("tasks").SETTINGS
    for name, rows in (("gsm8k", 1319), ("mmlu", 14042), ("mbpp", 378)):
        recipe = load_recipe(find_recipe(name))
        training, task = recipe.training, recipe.task
        assert training.batch_size * training.gradient_accumulation * training.num_processes == 16
        assert (training.epochs, training.warmup_steps, training.scheduler) == (1, 0, "constant")
        assert (training.max_grad_norm, task.max_length, task.padding) == (1.0, 512, "max_length")
        assert (task.held_out_share, task.held_out_seed, recipe.search.seeds) == (0.05, 42, [42])
        assert (recipe.search.adamw, recipe.search.muon, recipe.optimizer["adam_lr"]) == ([2e-6], [1e-4], 2e-6)
        assert recipe.optimizer["adjust_lr_fn"] == "original" and not task.append_eos
        assert recipe.model.gradient_checkpointing and recipe.model.name.endswith("Moonlight-16B-A3B")
        for benchmark in task.benchmarks:
            published = recipe.published[benchmark]
            assert {key: published[key] for key in ("adamw", "muon")} == settings[benchmark].published
            assert published["n"] == rows == settings[benchmark].num_rows
            # The binomial standard error of the published score, rounded as in the publication.
            error = (published["adamw"] * (1 - published["adamw"]) / rows) ** 0.5
            assert published["stderr"] == pytest.approx(error, abs=8e-4)


def test_variants_and_tiny_load_and_fit_one_machine(tmp_path):
    for name in ("gsm8k", "mmlu", "mbpp", "memory"):
        variants = load_recipe(find_recipe(name)).variants
        assert "qwen2.5-0.5b" in variants
        for variant in variants:
            recipe = load_recipe(find_recipe(name), [f"variant={variant}"])
            assert recipe.variant == variant and recipe.training.launch == "none"
            assert recipe.title != load_recipe(find_recipe(name)).title
            write_recipe(recipe, tmp_path / "config.yaml")
            assert load_recipe(tmp_path / "config.yaml").to_dict() == recipe.to_dict()
        assert load_recipe(find_recipe(name), tiny=True).model.name == ""
    with pytest.raises(UsageError, match=r"variant must be one of .*smollm2; got 'smolm2'. Did you mean 'smollm2'"):
        load_recipe(find_recipe("gsm8k"), ["variant=smolm2"])
    with pytest.raises(UsageError, match="variant must be left out, recipe 'demo' has none; got 'x'"):
        load_recipe(find_recipe("demo"), ["variant=x"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("task.benchmarks=[gsm9k]", "task.benchmarks must be one of gsm8k, mmlu, mbpp, mbpp_plus; got 'gsm9k'"),
        ("task.padding=short", "task.padding must be one of longest, max_length"),
        ("task.share=0", "task.share must lie in"),
        ("task.max_length=3", "task.max_length must be at least 16"),
        ("task.held_out_share=1.0", "task.held_out_share must lie in"),
        ("training.num_processes=-1", "training.num_processes must be finite and not negative"),
    ],
)
def test_bad_values_of_an_instruct_recipe(override, message):
    with pytest.raises(UsageError, match=message):
        load_recipe(find_recipe("gsm8k"), [override])
    with pytest.raises(UsageError, match=r"model.name must stay out of a recipe whose task.kind is not instruct"):
        load_recipe(find_recipe("demo"), ["model.name=x"])


def test_the_words_of_a_launched_run(tmp_path):
    recipe = load_recipe(find_recipe("gsm8k"))
    words = launched.command(recipe, tmp_path, RunSpec("muon", 1e-4, 42))
    at = words.index("launch")
    assert words[at + 1 : at + 5 : 2] == ["--config-file", "--num_processes"]
    assert words[at + 2].endswith("fsdp2_z2.yaml") and words[at + 4] == "4"
    assert words[words.index("-m") + 1 :][:5] == ["hf_muon.cli.training.worker", str(tmp_path), "muon", "0.0001", "42"]
    with pytest.raises(UsageError, match=r"training.launch must be a file or one of none, .*fsdp2_z2.*; got 'fsdp3'"):
        launched.has_devices(load_recipe(find_recipe("gsm8k"), ["training.launch=fsdp3"]))


def test_failed_workers_are_told_with_their_own_words(tmp_path, monkeypatch):
    import sys

    program = "import sys; print('noise'); print('hf-muon worker: the cable is out'); print('trace'); sys.exit(3)"
    monkeypatch.setattr(launched, "command", lambda *_: [sys.executable, "-c", program])
    recipe = load_recipe(find_recipe("gsm8k"))
    with pytest.raises(RunError, match=r"ended with code 3 and said: the cable is out The log is .* continues from"):
        launched.train_launched(recipe, tmp_path, RunSpec("muon", 1e-4, 42), print)


def test_a_run_continues_from_whole_checkpoints_only(tmp_path):
    assert checkpoints.last_whole_checkpoint(tmp_path) is None
    for step, whole in ((9, True), (10, True), (11, False)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if whole:
            (tmp_path / f"checkpoint-{step}" / checkpoints.WATCH_FILE).write_text("{}")
    assert checkpoints.last_whole_checkpoint(tmp_path).name == "checkpoint-10"
    checkpoints.drop_cut_checkpoints(tmp_path)
    assert [path.name for path in checkpoints.checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-10"]


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("SafetensorError: No space left (os error 28)")]
)
def test_a_full_disk_is_one_sentence(error, tmp_path):
    guard = checkpoints.full_disk_is_an_error_to_continue_from
    with pytest.raises(RunError, match=r"is full; nothing finished is lost\. Make room"), guard(tmp_path):
        raise error
    with pytest.raises(ValueError, match="other"), guard(tmp_path):
        raise ValueError("other")


def test_layouts_are_listed_once_each():
    assert len({needed for needed, _ in LAYOUTS}) == len(LAYOUTS)
    rows = read_pairs(shipped_data()["mmlu"] / "train.csv")
    assert {pair["answer"] for pair in rows} == set("ABCD") and len(rows) == 285
    assert all(json.dumps(pair) for pair in rows)


def test_a_worker_refuses_to_train_alone_where_several_were_asked_for(tmp_path, monkeypatch):
    """Otherwise a launch file that starts one process would pass one rank's result off as that of all."""
    from hf_muon.cli.training import worker

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    write_recipe(load_recipe(find_recipe("gsm8k")), tmp_path / "config.yaml")
    with pytest.raises(RunError, match=r"training\.launch must start 4 processes; fsdp2_z2 started 1\. Set dist"):
        worker.main([str(tmp_path), "muon", "1e-4", "42", "8", "1"])
