# SPDX-License-Identifier: Apache-2.0
"""What each architecture should look like, written by hand from its modeling file: the oracle of the routing tests.

One line per architecture: the tensors that belong on Muon, as the part of the name after the last layer index (the
whole name where there is none), `.weight` left out. Braces list alternatives. `!` marks a projection that holds
several matrices. Everything that is not listed belongs on AdamW. This file imports nothing from the package.
"""

from __future__ import annotations

import re

GLU = "mlp.{gate,up,down}_proj"
ATT = "self_attn.{q,k,v,o}_proj"
LLAMA = f"{ATT} {GLU}"
EXPERTS = f"{ATT} mlp.experts.gate_up_proj! mlp.experts.down_proj"
SHARED = f"{EXPERTS} mlp.shared_experts.{{gate,up,down}}_proj"
SHARED_AND_DENSE = f"{SHARED} {GLU}"
LATENT = "self_attn.{q_a_proj,q_b_proj,kv_a_proj_with_mqa!,kv_b_proj!,o_proj}"
LATENT_MOE = f"{LATENT} {GLU} mlp.experts.gate_up_proj! mlp.experts.down_proj mlp.shared_experts.{{gate,up,down}}_proj"
OPT = "self_attn.{k,v,q,out}_proj fc1 fc2"
GPT2 = "attn.c_attn! attn.c_proj mlp.c_fc mlp.c_proj"
BERT = "attention.self.{query,key,value} attention.output.dense intermediate.dense output.dense"
BART = f"{OPT} encoder_attn.{{k,v,q,out}}_proj"
T5 = "SelfAttention.{q,k,v,o} EncDecAttention.{q,k,v,o}"
VIT = "attention.{q,k,v,o}_proj mlp.fc1 mlp.fc2"
SPEECH = (
    "feature_projection.projection attention.{k,v,q,out}_proj feed_forward.intermediate_dense "
    "feed_forward.output_dense"
)

# (model type, AutoModelFor...) -> tensors on Muon
EXPECTED: dict[tuple[str, str], str] = {}


def _add(head: str, names: str, expected: str) -> None:
    for name in names.split():
        EXPECTED[name, head] = expected


# Decoders with separate projections
_add(
    "CausalLM",
    "llama mistral qwen2 qwen3 gemma gemma2 gemma3_text stablelm olmo olmo2 olmo3 cohere cohere2 granite smollm3 "
    "exaone4 helium ministral hunyuan_v1_dense seed_oss diffllama ernie4_5 bitnet vaultgemma",
    LLAMA,
)
_add("CausalLM", "nemotron arcee apertus", f"{ATT} mlp.{{up,down}}_proj")
_add("CausalLM", "phi", "self_attn.{q_proj,k_proj,v_proj,dense} mlp.fc1 mlp.fc2")
_add("CausalLM", "nanochat", f"{ATT} mlp.fc1 mlp.fc2")
_add("CausalLM", "starcoder2", f"{ATT} mlp.c_fc mlp.c_proj")
_add("CausalLM", "gpt_neo", "attn.attention.{k,v,q,out}_proj mlp.c_fc mlp.c_proj")
_add("CausalLM", "gptj", "attn.{k,v,q,out}_proj mlp.fc_in mlp.fc_out")
_add("CausalLM", "opt biogpt xglm", OPT)
_add("CausalLM", "doge", f"{LLAMA} self_attn.dt_proj")
_add("CausalLM", "dory", f"{LLAMA} self_attn.gate_proj")
# Decoders with fused projections
_add("CausalLM", "phi3", "self_attn.o_proj self_attn.qkv_proj! mlp.gate_up_proj! mlp.down_proj")
_add("CausalLM", "gpt2 gpt_bigcode openai-gpt", GPT2)
_add("CausalLM", "gpt_neox", "attention.query_key_value! attention.dense mlp.dense_h_to_4h mlp.dense_4h_to_h")
_add("CausalLM", "codegen", "attn.qkv_proj! attn.out_proj mlp.fc_in mlp.fc_out")
_add(
    "CausalLM",
    "bloom falcon",
    "self_attention.query_key_value! self_attention.dense mlp.dense_h_to_4h mlp.dense_4h_to_h",
)
_add("CausalLM", "persimmon", "self_attn.query_key_value! self_attn.dense mlp.dense_h_to_4h mlp.dense_4h_to_h")
_add("CausalLM", "mpt", "attn.Wqkv! attn.out_proj ffn.up_proj ffn.down_proj")
_add("CausalLM", "glm glm4", f"{ATT} mlp.gate_up_proj! mlp.down_proj")
_add("CausalLM", "moshi", "self_attn.{q,k,v,o}_proj.linear mlp.fc1! mlp.fc2")
_add("CausalLM", "modernbert-decoder", "attn.{q,k,v}_proj attn.Wo mlp.Wi! mlp.Wo")
# Latent attention
_add("CausalLM", "youtu", f"{LATENT} {GLU}")
_add("CausalLM", "deepseek_v2 deepseek_v3", LATENT_MOE)
# Mixtures of experts
_add("CausalLM", "mixtral qwen3_moe olmoe phimoe flex_olmo gpt_oss", EXPERTS)
_add("CausalLM", "qwen2_moe", f"{EXPERTS} mlp.shared_expert.{{gate,up,down}}_proj")
_add("CausalLM", "glm4_moe dots1 ernie4_5_moe", SHARED_AND_DENSE)
_add("CausalLM", "solar_open", SHARED)
_add("CausalLM", "afmoe", f"{SHARED_AND_DENSE} self_attn.gate_proj")
_add("CausalLM", "hunyuan_v1_moe", f"{EXPERTS} mlp.shared_mlp.{{gate,up,down}}_proj")
_add("CausalLM", "granitemoe", f"{ATT} block_sparse_moe.experts.gate_up_proj! block_sparse_moe.experts.down_proj")
_add(
    "CausalLM",
    "jetmoe",
    "mlp.input_linear! mlp.output_linear self_attention.experts.input_linear self_attention.experts.output_linear "
    "self_attention.kv_proj!",
)
_add(
    "CausalLM",
    "llama4_text",
    f"{ATT} feed_forward.experts.gate_up_proj! feed_forward.experts.down_proj "
    "feed_forward.shared_expert.{gate,up,down}_proj",
)
_add("CausalLM", "minimax", f"{EXPERTS} self_attn.qkv_proj! self_attn.out_proj self_attn.output_gate")
# State-space models and hybrids: projections are matrices; A_log, D, dt_bias, convolutions are not
_add("CausalLM", "mamba falcon_mamba", "mixer.{in_proj!,x_proj,dt_proj,out_proj}")
_add("CausalLM", "mamba2", "mixer.{in_proj!,out_proj}")
_add(
    "CausalLM",
    "jamba",
    f"{ATT} mamba.{{in_proj!,x_proj,dt_proj,out_proj}} feed_forward.{{gate,up,down}}_proj "
    "feed_forward.experts.gate_up_proj! feed_forward.experts.down_proj",
)
_add("CausalLM", "bamba", f"{ATT} mamba.{{in_proj!,out_proj}} feed_forward.{{gate,up,down}}_proj")
_add(
    "CausalLM",
    "granitemoehybrid",
    f"{ATT} mamba.{{in_proj!,out_proj}} shared_mlp.input_linear! shared_mlp.output_linear "
    "block_sparse_moe.experts.gate_up_proj! block_sparse_moe.experts.down_proj",
)
_add("CausalLM", "lfm2", "conv.{in_proj!,out_proj} self_attn.{q,k,v,out}_proj feed_forward.w{1,2,3}")
_add(
    "CausalLM",
    "qwen3_next",
    "linear_attn.{in_proj_qkvz!,in_proj_ba!,out_proj} self_attn.{q_proj!,k_proj,v_proj,o_proj} "
    "mlp.experts.gate_up_proj! mlp.experts.down_proj mlp.shared_expert.{gate,up,down}_proj",
)
_add(
    "CausalLM",
    "qwen3_5_text",
    f"linear_attn.in_proj_{{qkv!,z,b,a}} linear_attn.out_proj self_attn.{{q_proj!,k_proj,v_proj,o_proj}} {GLU}",
)
_add(
    "CausalLM",
    "recurrent_gemma",
    "temporal_block.{linear_y,linear_x,linear_out,q_proj,k_proj,v_proj,o_proj} mlp_block.{gate,up,down}_proj",
)
_add(
    "CausalLM",
    "rwkv",
    "attention.{key,value,receptance,output} feed_forward.{key,value,receptance}",
)
_add("CausalLM", "xlnet", "rel_attn.{q,k,v,o,r} ff.layer_1 ff.layer_2")
_add(
    "CausalLM",
    "dbrx",
    "norm_attn_norm.attn.Wqkv! norm_attn_norm.attn.out_proj ffn.experts.mlp.{w1,v1,w2}",
)
_add("CausalLM", "falcon_h1", f"{ATT} mamba.{{in_proj!,out_proj}} feed_forward.{{gate,up,down}}_proj")
_add(
    "CausalLM",
    "nemotron_h",
    "mixer.{in_proj!,out_proj,up_proj,down_proj} mixer.{q,k,v,o}_proj mixer.experts.{up,down}_proj "
    "mixer.shared_experts.{up,down}_proj",
)
_add(
    "CausalLM",
    "lfm2_moe",
    "conv.{in_proj!,out_proj} self_attn.{q,k,v,out}_proj feed_forward.w{1,2,3} "
    "feed_forward.experts.gate_up_proj! feed_forward.experts.down_proj",
)
# Encoders
_add(
    "MaskedLM",
    "bert roberta camembert xlm-roberta megatron-bert esm ibert nystromformer data2vec-text ernie",
    BERT,
)
_add("MaskedLM", "electra roformer", f"{BERT} {{model}}.embeddings_project")
_add("MaskedLM", "rembert", f"{BERT} rembert.encoder.embedding_hidden_mapping_in")
_add("MaskedLM", "big_bird", f"{BERT} bert.pooler")
_add("MaskedLM", "layoutlm", f"{BERT} layoutlm.pooler.dense")
_add("MaskedLM", "longformer", f"{BERT} attention.self.{{query,key,value}}_global")
_add("MaskedLM", "deberta", "attention.self.in_proj! attention.output.dense intermediate.dense output.dense")
_add(
    "MaskedLM",
    "deberta-v2",
    "attention.self.{query,key,value}_proj attention.output.dense intermediate.dense output.dense",
)
_add("MaskedLM", "mpnet", "attention.attn.{q,k,v,o} intermediate.dense output.dense")
_add("MaskedLM", "distilbert", "attention.{q,k,v,out}_lin ffn.lin1 ffn.lin2")
_add(
    "MaskedLM",
    "albert",
    "albert.encoder.embedding_hidden_mapping_in attention.{query,key,value,dense} ffn ffn_output",
)
_add("MaskedLM", "modernbert", "attn.Wqkv! attn.Wo mlp.Wi! mlp.Wo")
_add("MaskedLM", "eurobert", LLAMA)
_add("MaskedLM", "fnet", "intermediate.dense output.dense fnet.pooler.dense")
_add("MaskedLM", "xlm", "{q,k,v,out}_lin lin1 lin2")
# Encoder-decoders
_add("Seq2SeqLM", "t5", f"{T5} DenseReluDense.wi DenseReluDense.wo")
_add("Seq2SeqLM", "mt5 umt5", f"{T5} DenseReluDense.wi_0 DenseReluDense.wi_1 DenseReluDense.wo")
_add("Seq2SeqLM", "longt5", f"{T5} LocalSelfAttention.{{q,k,v,o}} DenseReluDense.wi DenseReluDense.wo")
_add("Seq2SeqLM", "bart mbart pegasus marian blenderbot m2m_100 plbart pegasus_x fsmt", BART)
_add("Seq2SeqLM", "t5gemma", f"{LLAMA} cross_attn.{{q,k,v,o}}_proj")
_add("SpeechSeq2Seq", "whisper", BART)
_add("SpeechSeq2Seq", "moonshine", f"{ATT} encoder_attn.{{q,k,v,o}}_proj mlp.fc1 mlp.fc2")
# Vision, audio, several modalities
_add("ImageClassification", "vit beit dinov2 ijepa", VIT)
_add("AudioClassification", "audio-spectrogram-transformer", VIT)
_add("ImageClassification", "swin", f"{VIT} downsample.reduction")
_add("ImageClassification", "convnext", "pwconv1 pwconv2")
_add("PreTraining", "vit_mae", f"{VIT} decoder.decoder_embed")
_add(
    "VideoClassification",
    "timesformer",
    "attention.attention.qkv! attention.output.dense intermediate.dense output.dense "
    "temporal_attention.attention.qkv! temporal_attention.output.dense temporal_dense",
)
_add(
    "VideoClassification",
    "videomae",
    "attention.attention.{query,key,value} attention.output.dense intermediate.dense output.dense",
)
for _name in ("wav2vec2", "hubert"):
    _add("CTC", _name, f"{_name}.{SPEECH}")
_add("", "clip", "self_attn.{k,v,q,out}_proj mlp.fc1 mlp.fc2 visual_projection text_projection")
_add(
    "",
    "siglip",
    "self_attn.{k,v,q,out}_proj mlp.fc1 mlp.fc2 text_model.head vision_model.head.attention.in_proj_weight! "
    "vision_model.head.attention.out_proj vision_model.head.mlp.fc1 vision_model.head.mlp.fc2",
)
_add("ImageTextToText", "qwen2_vl", f"attn.qkv! attn.proj mlp.fc1 mlp.fc2 model.visual.merger.mlp.* {LLAMA}")
_add(
    "ImageTextToText",
    "llava",
    f"self_attn.{{k,v,q,out}}_proj mlp.fc1 mlp.fc2 model.multi_modal_projector.linear_{{1,2}} {LLAMA}",
)


def expand(pattern: str) -> list[str]:
    """Return the names of a brace pattern."""
    match = re.search(r"\{([^{}]*)\}", pattern)
    if not match:
        return [pattern]
    head, tail = pattern[: match.start()], pattern[match.end() :]
    return [name for piece in match.group(1).split(",") for name in expand(head + piece + tail)]


def expected_names(model_type: str, head: str) -> tuple[set[str], set[str]]:
    """Return the short names on Muon and, among them, those with several matrices."""
    text = EXPECTED[model_type, head].replace("{model}", model_type)
    names = [name for piece in text.split() for name in expand(piece)]
    return {name.rstrip("!") for name in names}, {name[:-1] for name in names if name.endswith("!")}


def short_name(name: str) -> str:
    """Return the form in which this file names tensors."""
    name = re.sub(r"\.weight$", "", name)
    name = re.sub(r"\.\d+(?=\.|$)", ".*", name)
    return name.rpartition("*.")[2] if "*." in name else name
