# SPDX-License-Identifier: Apache-2.0
"""Random training rows for the tiny models of `tiny_models`, by the head of the model."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig, default_data_collator

Row = dict[str, Any]
LENGTH = 8


def rows_for(model_type: str, head: str, config: PretrainedConfig, count: int = 4) -> list[Row]:
    """Return `count` rows that the model trains on without a collator of its own."""
    make = _SPECIAL.get(model_type) or _BY_HEAD[head]
    return [make(config) for _ in range(count)]


def _text(config: PretrainedConfig) -> Row:
    ids = torch.randint(3, 64, (LENGTH,))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def _pixels(config: PretrainedConfig, *lead: int) -> torch.Tensor:
    size = getattr(config, "image_size", 32)
    height, width = (size, size) if isinstance(size, int) else size
    return torch.randn(*lead, config.num_channels, height, width)


def _image(config: PretrainedConfig) -> Row:
    return {"pixel_values": _pixels(config), "labels": torch.randint(config.num_labels, ())}


def _masked_image(config: PretrainedConfig) -> Row:
    return {"pixel_values": _pixels(config)}


def _video(config: PretrainedConfig) -> Row:
    return {"pixel_values": _pixels(config, config.num_frames), "labels": torch.randint(config.num_labels, ())}


def _waveform(config: PretrainedConfig) -> Row:
    return {"input_values": torch.randn(400), "labels": torch.randint(3, config.vocab_size, (5,))}


def _spectrogram(config: PretrainedConfig) -> Row:
    frames = torch.randn(config.max_length, config.num_mel_bins)
    return {"input_values": frames, "labels": torch.randint(config.num_labels, ())}


def _speech(config: PretrainedConfig) -> Row:
    frames = torch.randn(config.num_mel_bins, 2 * config.max_source_positions)
    return {"input_features": frames, "labels": torch.randint(3, 64, (LENGTH,))}


def _raw_speech(config: PretrainedConfig) -> Row:
    return {"input_values": torch.randn(2000), "labels": torch.randint(3, 64, (LENGTH,))}


def _boxes(config: PretrainedConfig) -> Row:
    corners = torch.randint(0, 30, (LENGTH, 2))
    return {**_text(config), "bbox": torch.cat([corners, corners + 10], dim=1)}


def _pair(config: PretrainedConfig) -> Row:
    return {"input_ids": torch.randint(3, 64, (LENGTH,)), "pixel_values": _pixels(config.vision_config)}


def _text_about_image(config: PretrainedConfig) -> Row:
    vision = config.vision_config
    row = _text(config)
    row["input_ids"][row["input_ids"] == config.image_token_id] += 1  # text that happens to be an image
    row["input_ids"][: (vision.image_size // vision.patch_size) ** 2] = config.image_token_id
    return {**row, "pixel_values": _pixels(vision)}


_BY_HEAD = {
    "CausalLM": _text,
    "MaskedLM": _text,
    "Seq2SeqLM": _text,
    "ImageTextToText": _text,
    "ImageClassification": _image,
    "VideoClassification": _video,
    "PreTraining": _masked_image,
    "CTC": _waveform,
    "AudioClassification": _spectrogram,
    "SpeechSeq2Seq": _speech,
    "": _pair,
}
_SPECIAL = {"moonshine": _raw_speech, "layoutlm": _boxes, "llava": _text_about_image}

_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_VISION |= {"image_size": 32, "patch_size": 16}
_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
}
_TEXT |= {"max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA = {**_TEXT, "model_type": "llama", "num_key_value_heads": 2}
# Sizes that two steps of training need beside those of `tiny_models`, which are enough for looking at parameters.
OVERRIDES: dict[str, dict[str, Any]] = {
    "clip": {"vision_config": _VISION, "text_config": _TEXT, "projection_dim": 16},
    "siglip": {"vision_config": _VISION, "text_config": _TEXT},
    "llava": {
        "vision_config": {**_VISION, "model_type": "clip_vision_model"},
        "text_config": _LLAMA,
        "image_token_index": 4,
    },
    "convnext": {"num_stages": 2, "depths": [1, 1], "hidden_sizes": [16, 32]},
    "t5": {"decoder_start_token_id": 0},
    "longt5": {"decoder_start_token_id": 0},
}


def collate(head: str) -> Any:
    """Return the collator of a head: transformers' default, and for contrastive pairs the wish for a loss."""
    extra = {"return_loss": True} if not head else {}
    return lambda rows: {**default_data_collator(rows), **extra}
