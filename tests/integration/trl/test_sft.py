# SPDX-License-Identifier: Apache-2.0
"""TRL's SFTTrainer takes `optim="dmuon"` as it is."""

import pytest

trl = pytest.importorskip("trl")

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.trainer_runs import EXACT, plain_optimizer, tiny_llama, training_entries


def test_sft_trainer_trains_with_muon(tmp_path):
    words = ["<pad>", "</s>", "<unk>", "one", "two", "three", "plus", "is"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    args = trl.SFTConfig(
        output_dir=str(tmp_path),
        optim="dmuon",
        optim_args=f"muon_lr=0.01,{EXACT}",
        max_steps=4,
        max_length=16,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    trainer = trl.SFTTrainer(
        model=tiny_llama(),
        args=args,
        train_dataset=Dataset.from_dict({"text": ["one plus one is two", "one plus two is three"] * 8}),
        processing_class=tokenizer,
    )
    trainer.train()
    assert type(plain_optimizer(trainer)).__name__ == "MuonWithAuxAdam"
    entries = training_entries(trainer)
    assert entries[0]["muon_lr"] == 0.01 and entries[-1]["loss"] < entries[0]["loss"]
