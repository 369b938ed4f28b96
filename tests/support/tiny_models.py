# SPDX-License-Identifier: Apache-2.0
"""Tiny random-init transformers models by model type: a few thousand parameters, no hub, no files."""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModel, PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

# Sizes by the names that configurations use. A key is passed only to configurations that know it.
_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "dim": 32,
    "embed_dim": 32,
    "embedding_size": 16,
    "word_embed_proj_dim": 32,
    "emb_dim": 32,
    "decoder_hidden_size": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "d_ff": 48,
    "d_inner": 48,
    "hidden_dim": 48,
    "n_inner": 48,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "d_head": 8,
    "d_kv": 8,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "n_ctx": 64,
    "max_seq_len": 64,
    "rotary_dim": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "state_size": 8,
    "time_step_rank": 4,
    "mamba_d_state": 8,
    "mamba_dt_rank": 4,
    "mamba_d_head": 16,
    "mamba_n_heads": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "image_size": 32,
    "patch_size": 16,
    "num_mel_bins": 16,
    "max_source_positions": 32,
    "max_target_positions": 32,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "num_labels": 3,
}

# What single families need beside the sizes above.
_SPECIAL: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 32},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1, "expand": 2},
    "falcon": {"new_decoder_architecture": False, "multi_query": True},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "wav2vec2": {"conv_dim": [16, 16], "conv_kernel": [3, 3], "conv_stride": [2, 2], "num_feat_extract_layers": 2},
    "wavlm": {"conv_dim": [16, 16], "conv_kernel": [3, 3], "conv_stride": [2, 2], "num_feat_extract_layers": 2},
    "hubert": {"conv_dim": [16, 16], "conv_kernel": [3, 3], "conv_stride": [2, 2], "num_feat_extract_layers": 2},
    "swin": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "patch_size": 4},
    "swinv2": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "patch_size": 4},
    "funnel": {"block_sizes": [1, 1], "d_model": 32, "num_decoder_layers": 1},
    "gpt_oss": {"head_dim": 8},
    "recurrent_gemma": {"num_hidden_layers": 3, "block_types": ["recurrent", "recurrent", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "phi3": {"pad_token_id": 0},
    "xlm": {"emb_dim": 32},
    "minimax": {"layer_types": ["linear_attention", "full_attention"]},
    "bert": {"num_labels": 3},
    "timesformer": {"num_frames": 2},
    "dinov2": {"use_swiglu_ffn": False},
    "llama4_text": {"interleave_moe_layer_step": 1, "intermediate_size_mlp": 48, "no_rope_layers": [1, 0]},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 48,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
    },
    "bamba": {"attn_layer_indices": [1], "mamba_n_groups": 1},
    "moshi": {"num_codebooks": 2},
    "gemma3n_text": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64},
    "deit": {"problem_type": None},
    "zamba": {
        "num_hidden_layers": 6,
        "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "mamba", "hybrid"],
        "n_mamba_heads": 2,
        "attn_layer_period": 3,
        "attn_layer_offset": 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
    },
    # latent attention rebuilds a key for every query head
    "deepseek_v2": {"num_key_value_heads": 4, "head_dim": 4},
    "deepseek_v3": {"num_key_value_heads": 4, "head_dim": 4},
    "youtu": {"num_key_value_heads": 4, "head_dim": 4},
    "longcat_flash": {"num_key_value_heads": 4},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "n_mamba_heads": 4, "num_mem_blocks": 1, "mamba_ngroups": 1},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "squeezebert": {"embedding_size": 32},
}


def tiny_config(model_type: str, **overrides: Any) -> PretrainedConfig:
    """Return a tiny configuration of `model_type`; `overrides` win."""
    config_class = CONFIG_MAPPING[model_type]
    logging.disable(logging.WARNING)  # defaults of some families complain about the tiny vocabulary
    try:
        known = {*config_class().to_dict(), *getattr(config_class, "attribute_map", {})}
        mapped = getattr(config_class, "attribute_map", {})
        sizes = {key: value for key, value in _SIZES.items() if key in known and mapped.get(key, key) in known}
        sizes = {key: value for key, value in sizes.items() if mapped.get(key) not in sizes}
        return config_class(**{**sizes, **_SPECIAL.get(model_type, {}), **overrides})
    finally:
        logging.disable(logging.NOTSET)


def tiny_model(model_type: str, head: str = "CausalLM", *, device: str = "cpu", **overrides: Any) -> PreTrainedModel:
    """Return a random-init model of `model_type`.

    Args:
        model_type: as in `config.model_type`.
        head: the part after `AutoModelFor` (`CausalLM`, `SequenceClassification`, ...), or "" for the bare model.
        device: `cpu` or `meta`.
        overrides: configuration values.
    """
    config = tiny_config(model_type, **overrides)
    auto = getattr(modeling_auto, f"AutoModelFor{head}") if head else AutoModel
    with torch.device(device):
        return (
            auto.from_config(config, attn_implementation="eager") if head != "bare" else AutoModel.from_config(config)
        )
