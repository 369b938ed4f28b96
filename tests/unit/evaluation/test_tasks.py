# SPDX-License-Identifier: Apache-2.0
"""Rows, extraction and scores: gold answers are right, perturbed ones wrong, bad files are one sentence."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from evaluation.extraction import cut_at_stops, gsm8k_answer, gsm8k_is_decided, mmlu_letter, program_text
from evaluation.mbpp import _like
from evaluation.prompts import instruction_prompt, programming_question
from evaluation.rows import DataError
from evaluation.sandbox.comparison import equal_outputs
from evaluation.tasks import SETTINGS, load_rows, require_permission, run_tests, score

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "tests" / "data" / "evaluation"
GSM8K = ROOT / "recipes" / "data" / "gsm8k" / "test.jsonl"
GSM8K_FORMS = (
    "#### {}",
    "####{}",
    "7 and 8 make 15.\n#### {}\n#### 3",
    "#### ${}\nNext question: 99",
    "First 12, then 13; the answer is {}.",
    "It costs ${}",
    "12 - 3 = {}",
)
MMLU_FORMS = ("{}", " {}", "\n{}", "{}. because B", "({})", "the answer is {} not A")


def objects(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_gsm8k_gold_is_right_and_perturbed_is_wrong():
    rows, raw = load_rows("gsm8k", GSM8K), objects(GSM8K)
    assert len(rows) == 120 and [row.id for row in rows] == list(range(120))
    for row, source in zip(rows, raw, strict=True):
        assert score("gsm8k", row, source["answer"])
        body, gold = source["answer"].rsplit("#### ", 1)
        wrong = str(int(gold.replace(",", "")) + random.choice([-10, -1, 1, 10, 1000]))
        assert not score("gsm8k", row, f"{body}#### {wrong}")
        assert not score("gsm8k", row, f"{body}#### -{gold}") and not score("gsm8k", row, f"#### {gold}.5")
        for form in GSM8K_FORMS:
            for number in {gold, row.reference, f"{int(row.reference):,}"}:
                assert score("gsm8k", row, form.format(number)), form
            assert not score("gsm8k", row, form.format(wrong)), form


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 1,234", "1234"),
        ("#### $5.50.", "5.50"),
        ("so 3 + 4 = 7.", "7"),
        ("-12", "-12"),
        ("\u221212", "-12"),
        ("about .5", ".5"),
        ("#### nothing, but 6", "6"),
        ("no digits", None),
        ("", None),
        ("1, 2, 3", "3"),
        ("####\n42", "42"),
        ("#### 18 eggs and 20", "18"),
    ],
)
def test_gsm8k_extraction(text, answer):
    assert gsm8k_answer(text) == answer


def test_gsm8k_is_decided_only_when_nothing_can_change():
    """For every prefix: once decided, every longer prefix gives the same answer."""
    for text in ("x 5\n#### 1,234.50 and 7", "#### 18.\n#### 4", "#### $9,\n8", "#### 12"):
        decided = [gsm8k_answer(text[:end]) for end in range(len(text) + 1) if gsm8k_is_decided(text[:end])]
        assert all(answer == gsm8k_answer(text) for answer in decided)
    assert gsm8k_is_decided("#### 18\n") and not gsm8k_is_decided("#### 18") and not gsm8k_is_decided("#### 1,")


def test_mmlu_gold_is_right_and_perturbed_is_wrong():
    rows = load_rows("mmlu", DATA / "mmlu.csv")
    assert len(rows) == 48 and len({row.reference for row in rows}) == 4
    for row in rows:
        for form in MMLU_FORMS:
            for letter in "ABCD":
                assert score("mmlu", row, form.format(letter)) == (letter == row.reference)
    assert mmlu_letter("Answer: B") == "A"  # as published: the first such character, wherever it stands
    assert mmlu_letter("b") is None
    # A folder of files gives the same rows.
    assert load_rows("mmlu", DATA) == rows


def test_mmlu_prompt_is_the_published_one():
    row = load_rows("mmlu", DATA / "mmlu.csv")[0]
    lines = row.prompt.split("\n")
    assert lines[0] == "### Instruction:" and lines[2].startswith("A. ") and lines[5].startswith("D. ")
    assert lines[6:] == ["Answer with the letter of the correct choice.", "", "### Response:", ""]
    assert instruction_prompt("q", "i") == "### Instruction:\nq\n\n### Input:\ni\n\n### Response:\n"


def hub_layout(row):
    """The columns of evalplus/mbppplus, made from a row of the original layout."""
    test = "import numpy as np\nimport math\n" + "\n".join(row["test_list"])
    return {
        "task_id": row["task_id"],
        "code": row["code"],
        "prompt": row["text"],
        "test_imports": ["import math"],
        "test_list": row["test_list"],
        "test": test,
    }


def test_mbpp_canonical_solutions_pass_and_those_of_other_tasks_fail(tmp_path):
    hub = tmp_path / "hub.jsonl"
    hub.write_text("".join(json.dumps(hub_layout(row)) + "\n" for row in objects(DATA / "mbpp.jsonl")[:3]))
    jobs, wanted = [], []
    for task, file, key in (
        ("mbpp", DATA / "mbpp.jsonl", "code"),
        ("mbpp", DATA / "mbpp_plus.jsonl", "canonical_solution"),
        ("mbpp_plus", DATA / "mbpp_plus.jsonl", "canonical_solution"),
        ("mbpp_plus", hub, "code"),
    ):
        rows, raw = load_rows(task, file), objects(file)
        for index, row in enumerate(rows):
            jobs += [(row, raw[index][key]), (row, raw[index - 1][key])]
            wanted += [True, False]
    with ThreadPoolExecutor(3) as pool:
        outcomes = list(pool.map(lambda job: run_tests(*job), jobs))
    assert [outcome.passed for outcome in outcomes] == wanted, [outcome.reason for outcome in outcomes]


def test_plus_inputs_find_what_the_base_misses():
    """Right on the three base cases, wrong on the added ones."""
    path = DATA / "mbpp_plus.jsonl"
    assert all(len(case[0]) == 4 for case in objects(path)[0]["base_input"])
    source = "def similar_elements(a, b):\n    return tuple(set(a) & set(b)) if len(a) == 4 else ('-',)"
    assert run_tests(load_rows("mbpp", path)[0], f"```python\n{source}\n```").passed
    assert not run_tests(load_rows("mbpp_plus", path)[0], source).passed


def test_set_up_code_runs_after_the_program(tmp_path):
    row = {
        "task_id": 1,
        "text": "Make a node.",
        "code": "",
        "test_setup_code": "root = Node(3)",
        "test_list": ["assert value(root) == 3"],
    }
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    source = "class Node:\n    def __init__(self, v): self.v = v\ndef value(n): return n.v"
    assert run_tests(load_rows("mbpp", path)[0], source).passed


def test_programming_prompts_show_the_function():
    assert "assert min_cost(" in load_rows("mbpp", DATA / "mbpp.jsonl")[0].prompt
    prompt = load_rows("mbpp", DATA / "mbpp_plus.jsonl")[0].prompt
    assert "'''" not in prompt and prompt.count("assert similar_elements(") == 1
    assert programming_question('"""\nDo it.\nassert f(1) == 2\n"""', "assert f(1) == 2") == "Do it.\nassert f(1) == 2"


def test_types_that_json_loses_come_back():
    assert _like([[1, 2], [3]], [[(1, 2, 3), (4,)]]) == [(1, 2), (3,)]
    assert _like([[[1, 2], [3, 4], [5, 6]]], [[[(1, 2)]], [[(3, 4), (5, 6)]]]) == [[(1, 2), (3, 4), (5, 6)]]
    assert _like([[], "a"], [[(), "b"]]) == [(), "a"]
    assert _like([{"a": [1]}], [[{"k": (2,)}]]) == [{"a": (1,)}]
    assert _like([[1, 2]], [[{1, 2}]]) == [{1, 2}]
    assert _like(["1+2j"], [[1j]]) == [1 + 2j]
    assert _like([[1], 2], []) == [[1], 2]


@pytest.mark.parametrize(
    ("name", "output", "expected", "tolerance", "right"),
    [
        ("f", 1, 1, 0, True),
        ("f", 0.1 + 0.2, 0.3, 0, True),
        ("f", [0.1 + 0.2], [0.3], 0, True),
        ("f", (0.3,), [0.3], 0, False),
        ("f", 0.31, 0.3, 0.1, True),
        ("f", 0.31, 0.3, 1e-4, False),
        ("f", "a", "b", 1.0, False),
        ("f", float("inf"), 1.0, 1.0, False),
        ("f", [0.3, 0.3], [0.3], 0, False),
        ("similar_elements", (2, 1), (1, 2), 0, True),
        ("check_str", object(), True, 0, True),
        ("check_str", None, True, 0, False),
        ("check_str", False, True, 0, False),
        ("sum_div", 0, 5, 0, True),
    ],
)
def test_outputs_are_compared_as_evalplus_does(name, output, expected, tolerance, right):
    assert equal_outputs(name, output, expected, tolerance) is right


def test_completions():
    assert program_text("Here:\n```python\ndef f(): pass\n```\nDone") == "def f(): pass\n"
    assert program_text("def f(): pass") == "def f(): pass"
    assert program_text("```\nx = 1") == "x = 1"
    assert cut_at_stops("def f():\n  pass\nprint(1)\ndef g", SETTINGS["mbpp"].stops) == "def f():\n  pass"


def test_limit_and_seed():
    everything = load_rows("gsm8k", GSM8K)
    assert load_rows("gsm8k", GSM8K, limit=5) == everything[:5]
    drawn = load_rows("gsm8k", GSM8K, limit=20, seed=3)
    assert drawn == load_rows("gsm8k", GSM8K, limit=20, seed=3) != load_rows("gsm8k", GSM8K, limit=20, seed=4)
    assert [row.id for row in drawn] == sorted(row.id for row in drawn) and all(row in everything for row in drawn)
    assert load_rows("gsm8k", GSM8K, limit=500, seed=1) == everything


HEADER = "question,choice0,choice1,choice2,choice3,answer\n"


@pytest.mark.parametrize(
    ("task", "name", "content", "message"),
    [
        ("gsm8k", "a.jsonl", "", "a.jsonl must hold at least one row; got none."),
        ("gsm8k", "a.jsonl", "\n\n", "must hold at least one row"),
        (
            "gsm8k",
            "a.jsonl",
            '{"question": "q", "answer": "#### 1"}\n{"question": ',
            "a.jsonl:2 must be a JSON object",
        ),
        ("gsm8k", "a.jsonl", "[1]\n", "a.jsonl:1 must be a JSON object; got '[1]'."),
        (
            "gsm8k",
            "a.jsonl",
            '{"question": "q", "answr": "1"}\n',
            "must have the column 'answer' (columns: question, answ",
        ),
        ("gsm8k", "a.jsonl", '{"question": "q", "answr": "1"}\n', "Nearest: 'answr'."),
        (
            "gsm8k",
            "a.jsonl",
            '{"question": "q", "answer": "12"}\n',
            "a.jsonl:1 must end its answer with '#### number'",
        ),
        (
            "gsm8k",
            "a.jsonl",
            '{"question": 3, "answer": "#### 1"}\n',
            "a.jsonl:1 must hold text in 'question'; got 3.",
        ),
        ("gsm8k", "a.jsonl", b"\xff\xfe", "a.jsonl must be UTF-8 text; got byte 0xff at 0."),
        ("mmlu", "a.csv", "", "must hold at least one row"),
        ("mmlu", "a.csv", HEADER, "must hold at least one row"),
        ("mmlu", "a.csv", "question,a,b,c,d,answer\nq,1,2,3,4,0\n", "must have the column 'choice0'"),
        ("mmlu", "a.csv", HEADER + "q,1,2,3,4,4\n", "a.csv:2 must hold an index from 0 to 3 in 'answer'; got '4'."),
        ("mmlu", "a.csv", HEADER + "q,1,2,3,4,B\n", "must hold an index from 0 to 3"),
        ("mmlu", "a.csv", HEADER + "q,1,2,3,4,0\nq,1,2\n", "a.csv:3 must have 6 fields; got 3."),
        ("mmlu", "a.csv", HEADER + 'q,1,2,3,4,"0\n', "a.csv:2 must be a row of CSV"),
        ("mmlu", "a.jsonl", '{"question": "q", "choices": ["a"], "answer": 0}\n', "must hold four choices"),
        ("mbpp", "a.jsonl", '{"text": "t", "code": "c"}\n', "must have the column 'task_id'"),
        ("mbpp", "a.jsonl", '{"task_id": 1, "text": "t", "code": "c"}\n', "must have the column 'test_list'"),
        (
            "mbpp",
            "a.jsonl",
            '{"task_id": 1, "text": "t", "test_list": "x"}\n',
            "must hold a list of texts in 'test_list'",
        ),
        ("mbpp", "a.jsonl", '{"task_id": 1, "text": "t", "test_list": []}\n', "at least one assertion"),
        ("mbpp", "a.jsonl", '{"task_id": [1], "text": "t", "test_list": []}\n', "number or text in 'task_id'"),
        ("mbpp_plus", "a.jsonl", '{"task_id": 1, "text": "t", "test_list": ["x"]}\n', "must have the column 'test'"),
        ("mbpp", "a.jsonl", '{"task_id": 1, "text": "t", "test_list": ["x"]}\n' * 2, "must hold each task_id once"),
        (
            "mbpp_plus",
            "a.jsonl",
            '{"task_id": 1, "prompt": "t", "entry_point": "f", "canonical_solution": "", "base_input": 3}\n',
            "must hold a list of argument lists in 'base_input'; got 3.",
        ),
    ],
)
def test_bad_files_are_one_sentence(task, name, content, message, tmp_path):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as error:
        load_rows(task, path)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_what_is_not_there(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"nowhere\.jsonl must be a readable file; got: No such file"):
        load_rows("gsm8k", tmp_path / "nowhere.jsonl")
    with pytest.raises(DataError, match=r"TASK must be one of .*; got 'gsmk'\. Did you mean 'gsm8k'\?"):
        load_rows("gsmk", None)
    with pytest.raises(DataError, match="must hold CSV files"):
        load_rows("mmlu", tmp_path)
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: (_ for _ in ()).throw(ConnectionError()))
    with pytest.raises(
        DataError, match=r"gsm8k must find the hub data set openai/gsm8k; got ConnectionError\. Give a"
    ):
        load_rows("gsm8k", None)


def test_hub_rows_are_read_like_files(monkeypatch):
    asked = []

    def load(name, config, split):
        asked.append((name, config, split))
        return [{"question": "q", "subject": "s", "choices": ["w", "x", "y", "z"], "answer": 2}]

    monkeypatch.setattr("datasets.load_dataset", load)
    (row,) = load_rows("mmlu", None)
    assert asked == [("cais/mmlu", "all", "test")] and row.reference == "C" and "C. y" in row.prompt


def test_an_override_path_stands_for_the_hub(monkeypatch):
    monkeypatch.setenv("MBPP_OVERRIDE_PATH", str(DATA / "mbpp_plus.jsonl"))
    assert len(load_rows("mbpp_plus", None)) == 8


def test_programs_need_permission(monkeypatch):
    monkeypatch.delenv("HF_ALLOW_CODE_EVAL", raising=False)
    (row, *_) = load_rows("mbpp", DATA / "mbpp.jsonl")
    with pytest.raises(DataError, match=r"needs --allow-code-execution \(or HF_ALLOW_CODE_EVAL=1\); nothing was run"):
        score("mbpp", row, "x = 1")
    assert not score("mbpp", row, "x = 1", allow_code_execution=True)
    monkeypatch.setenv("HF_ALLOW_CODE_EVAL", "1")
    assert not score("mbpp", row, "x = 1")
    require_permission("gsm8k", False)
