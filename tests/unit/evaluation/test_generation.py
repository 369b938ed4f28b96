# SPDX-License-Identifier: Apache-2.0
"""Greedy generation against a loop without batches, padding or cache; letters against whole forward passes."""

import logging
import random

import pytest
import torch
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from evaluation.extraction import gsm8k_is_decided
from evaluation.generation import _say_once, encode_prompts, generate, padding_id
from evaluation.likelihood import letter_log_likelihoods
from evaluation.prompts import LETTERS
from hf_muon.cli.training.text import train_tokenizer

TEXT = "### Instruction:\nAdd 12 and 30. #### 42\nThe quick brown fox jumps over A B C D lazy dogs.\n### Response:\n"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([TEXT] * 3, 300)


@pytest.fixture
def model(tokenizer):
    # Wide initial values: the best token then leads clearly, so that float ties between batch shapes do not occur.
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, initializer_range=0.5, **sizes)
    return LlamaForCausalLM(config)


def prompts(count):
    words = TEXT.split(" ")
    return [" ".join(random.choices(words, k=random.randint(1, 12))) for _ in range(count)]


@torch.no_grad()
def alone(model, tokenizer, prompt, max_new_tokens):
    """The reference: one prompt, whole forward passes, argmax."""
    model.eval()
    ids = list(tokenizer(prompt)["input_ids"])
    new = []
    while len(new) < max_new_tokens:
        token = int(model(torch.tensor([ids + new])).logits[0, -1].argmax())
        if token == tokenizer.eos_token_id or token == model.config.eos_token_id:
            break
        new.append(token)
    return tokenizer.decode(new, skip_special_tokens=True)


def flat(batches):
    return [text for batch in batches for text in batch]


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_completions_do_not_depend_on_the_batch(batch_size, model, tokenizer):
    asked = prompts(8)
    expected = [alone(model, tokenizer, prompt, 12) for prompt in asked]
    model.train()
    finished = []
    got = generate(model, tokenizer, asked, max_new_tokens=12, batch_size=batch_size, on_batch=finished.append)
    assert flat(got) == expected
    assert sum(finished) == 8 and max(finished) <= batch_size and model.training


def test_learned_positions_and_no_padding_token(tokenizer):
    config = GPT2Config(
        vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.5
    )
    config.bos_token_id = config.eos_token_id = tokenizer.eos_token_id
    model, asked = GPT2LMHeadModel(config), [prompt[:30] for prompt in prompts(5)]
    expected = [alone(model, tokenizer, prompt, 10) for prompt in asked]
    own, tokenizer.pad_token = tokenizer.pad_token, None
    try:
        assert padding_id(tokenizer) == tokenizer.eos_token_id
        assert flat(generate(model, tokenizer, asked, max_new_tokens=10, batch_size=5)) == expected
    finally:
        tokenizer.pad_token = own


def test_stops_cut_and_end_a_row(model, tokenizer):
    asked = prompts(4)
    whole = flat(generate(model, tokenizer, asked, max_new_tokens=24))
    # A stop from the first tokens of each row, so that all of them end early.
    stops = [text[2:4] for text in whole if len(text) >= 4]
    calls = []
    hook = model.register_forward_hook(lambda *_: calls.append(1))
    got = flat(generate(model, tokenizer, asked, max_new_tokens=24, stops=stops))
    hook.remove()
    for text, full in zip(got, whole, strict=True):
        assert full.startswith(text) and not any(stop in text for stop in stops)
        assert text == full or any(full[len(text) :].startswith(stop) for stop in stops)
    assert len(calls) < 24


def test_a_decided_row_does_not_depend_on_its_neighbours(model, tokenizer):
    asked = prompts(6)

    def decided(text):
        return len(text) >= 5 + len(text) % 7

    one = flat(generate(model, tokenizer, asked, max_new_tokens=16, decided=decided, batch_size=1))
    six = flat(generate(model, tokenizer, asked, max_new_tokens=16, decided=decided, batch_size=6))
    assert one == six
    assert not gsm8k_is_decided("")


def test_the_models_own_generation_settings_are_left_out(model, tokenizer):
    asked = prompts(3)
    expected = flat(generate(model, tokenizer, asked, max_new_tokens=12))
    own = GenerationConfig(repetition_penalty=3.0, no_repeat_ngram_size=1, do_sample=True, temperature=9.0, top_k=3)
    own.eos_token_id = model.generation_config.eos_token_id
    model.generation_config = own
    assert flat(generate(model, tokenizer, asked, max_new_tokens=12)) == expected
    assert model.generation_config is own


def test_a_cache_that_checkpointing_switched_off_is_used_and_restored(model, tokenizer):
    asked = prompts(2)
    expected = flat(generate(model, tokenizer, asked, max_new_tokens=8))
    model.config.use_cache = False
    widths = []
    hook = model.model.layers[0].register_forward_pre_hook(lambda _, inputs: widths.append(inputs[0].shape[1]))
    assert flat(generate(model, tokenizer, asked, max_new_tokens=8)) == expected
    hook.remove()
    assert set(widths[1:]) == {1} and model.config.use_cache is False


def test_what_does_not_fit_the_positions_is_cut_with_one_log_line(model, tokenizer, caplog):
    logging.getLogger("hf_muon").propagate = True
    _say_once.cache_clear()
    long = "fox " * 400
    with caplog.at_level("WARNING", "hf_muon.evaluation"):
        first = flat(generate(model, tokenizer, [long, "fox"], max_new_tokens=8))
        again = flat(generate(model, tokenizer, [long], max_new_tokens=8))
    assert first[0] == again[0] and len(caplog.records) == 1
    assert "the model holds 256 positions: 8 new tokens at most, and a prompt keeps its last 248." in caplog.text


def test_an_end_token_that_the_tokenizer_appends_is_removed(tokenizer):
    class Appends:
        eos_token_id = tokenizer.eos_token_id

        def __call__(self, texts):
            return {"input_ids": [[*ids, self.eos_token_id] for ids in tokenizer(texts)["input_ids"]]}

    assert encode_prompts(Appends(), ["fox A"]) == tokenizer(["fox A"])["input_ids"]


def test_batch_size_must_be_positive(model, tokenizer):
    with pytest.raises(ValueError, match="batch_size must be 1 or more; got 0"):
        next(generate(model, tokenizer, ["x"], max_new_tokens=2, batch_size=0))


def test_letters_have_the_probability_of_a_whole_forward_pass(model, tokenizer):
    asked = [prompt + "\n### Response:\n" for prompt in prompts(5)]
    got = letter_log_likelihoods(model, tokenizer, asked)
    for prompt, scores in zip(asked, got, strict=True):
        logits = model(torch.tensor([tokenizer(prompt)["input_ids"]])).logits[0, -1].double()
        expected = torch.log_softmax(logits, -1)
        for letter in LETTERS:
            (token,) = tokenizer(letter)["input_ids"]
            # fp32 arithmetic on logits of about 10: padding and batching move the last digits.
            assert scores[letter] == pytest.approx(expected[token].item(), abs=2e-4)
    assert letter_log_likelihoods(model, tokenizer, []) == []


def test_letters_must_be_single_tokens(model):
    class Words:
        def __call__(self, texts):
            return {"input_ids": [[1] * len(text) + ([2] if text.endswith("C") else []) for text in texts]}

    with pytest.raises(ValueError, match="must write each of A, B, C and D as one token"):
        letter_log_likelihoods(model, Words(), ["x"])
