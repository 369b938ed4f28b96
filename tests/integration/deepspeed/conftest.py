# SPDX-License-Identifier: Apache-2.0
"""Tiny saved models, and the end of the DeepSpeed processes after this folder's tests."""

import pytest
import torch

from tests.integration.deepspeed import jobs
from tests.support import cpu_deepspeed


def save(model, folder):
    """Save a model and return its folder."""
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="package", autouse=True)
def _processes():
    yield
    cpu_deepspeed.close()


def build_llama():
    """A Llama whose sizes no number of ranks divides; weights large enough for gradients well above rounding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=jobs.VOCABULARY,
        hidden_size=36,
        intermediate_size=53,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=32,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


@pytest.fixture(scope="package")
def llama(tmp_path_factory):
    """The folder of that Llama."""
    return save(build_llama(), tmp_path_factory.mktemp("llama"))
