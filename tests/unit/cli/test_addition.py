# SPDX-License-Identifier: Apache-2.0
"""The addition task: what is held out stays out, rows say what they mean, decoding scores whole answers."""

import pytest

from hf_muon.cli.recipe import Recipe
from hf_muon.cli.resources import load_evaluation
from hf_muon.cli.training.addition import END, IGNORED, AdditionTask, decode, question_and_answer, split_of


@pytest.fixture(scope="module")
def task():
    recipe = Recipe(name="x")
    recipe.task.kind = "addition"
    recipe.task.eval_rows = 0
    return AdditionTask(recipe)


def test_held_out_pairs_are_never_trained_on_not_even_swapped(task):
    train = {frozenset(pair) for pair in task.pairs["train"]}
    validation = {frozenset(pair) for pair in task.pairs["validation"]}
    test = {frozenset(pair) for pair in task.pairs["test"]}
    assert not train & test and not train & validation and not validation & test
    assert sum(len(pairs) for pairs in task.pairs.values()) == 100 * 100
    # A tenth each by hash; 5,050 unordered pairs give a standard error of 0.4 points.
    assert 0.08 < len(task.pairs["test"]) / 10_000 < 0.12
    assert 0.08 < len(task.pairs["validation"]) / 10_000 < 0.12


def test_the_split_does_not_depend_on_the_process():
    assert [split_of(a, a + 1) for a in range(8)] == [split_of(a + 1, a) for a in range(8)]
    assert {split_of(a, b) for a in range(20) for b in range(20)} == {"train", "validation", "test"}


def test_a_row_asks_the_question_and_counts_the_answer_alone(task):
    for (a, b), row in zip(task.pairs["train"][:50], task.train.select(range(50)), strict=True):
        question, answer = question_and_answer(a, b)
        assert decode(row["input_ids"]) == question + answer
        assert int(answer[::-1]) == a + b
        counted = [token for token in row["labels"] if token != IGNORED]
        assert decode(counted) == answer and counted[-1] == END


def test_exact_match_counts_whole_answers():
    metrics = load_evaluation("exact_match")
    assert metrics.exact_match(["12", "31 ", "4"], ["12", "31", "44"]) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="one to one; got 1 and 2"):
        metrics.exact_match(["1"], ["1", "2"])


def test_greedy_continuations_do_not_depend_on_the_company(task):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        **task.model_config(),
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    prompts = [[1, 10, 2, 11], [1, 2, 10, 3, 11], [3, 10, 9, 11]]
    greedy = load_evaluation("exact_match").greedy_continuations
    together = greedy(model, prompts, max_new_tokens=4, end=END)
    assert together == [greedy(model, [prompt], max_new_tokens=4, end=END)[0] for prompt in prompts]
    with torch.no_grad():  # the first token against a plain forward pass
        first = model(torch.tensor([prompts[0]])).logits[0, -1].argmax().item()
    assert (together[0] or [END])[0] == first


def test_held_out_loss_is_a_mean_over_tokens():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    ids = torch.randint(0, 9, (3, 5))
    labels = ids.clone()
    labels[0, :4] = IGNORED
    batches = [{"input_ids": ids[:1], "labels": labels[:1]}, {"input_ids": ids[1:], "labels": labels[1:]}]
    mean = load_evaluation("held_out").mean_token_loss(model, batches)
    assert mean == pytest.approx(model(input_ids=ids, labels=labels).loss.item(), rel=1e-5)  # fp32 summation order
    with pytest.raises(ValueError, match="at least one counted token"):
        load_evaluation("held_out").mean_token_loss(model, [])
