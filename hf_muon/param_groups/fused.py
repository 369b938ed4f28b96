# SPDX-License-Identifier: Apache-2.0
"""`matrix_split=fused`: which rows of a fused projection belong to which matrix.

Every entry names classes of transformers whose forward pass was read for it; the numbers come from the instance
(or its config), never from the shape alone. An unlisted module stays one matrix.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Callable
from typing import Any

from torch import nn

from .layouts import known_raw_view
from .sites import Site, class_name, true_shape
from .views import MatrixView

logger = logging.getLogger("hf_muon.param_groups")

Layout = tuple[int, tuple[int, ...]]  # (groups, rows of each part in a group)
Reader = Callable[[Any, int], Layout]  # (module that runs the projection, its output rows) -> layout

# Attribute names that suggest a fused projection: only used to say that one was left whole.
_LOOKS_FUSED = re.compile(
    r"qkv|query_key_value|c_attn$|gate_up|^kv_proj$|^to_kv$|in_proj_ba|^in_proj$|^in_proj_weight$", re.I
)


def _consecutive(count: int) -> Reader:
    """Read `count` equal matrices one above the other."""
    return lambda module, rows: (1, (rows // count,) * count)


def _interleaved(count: int) -> Reader:
    """Read rows 0, count, 2*count, ... as the first matrix, and so on."""
    return lambda module, rows: (rows // count, (1,) * count)


def _per_head(heads: str, *sizes: str) -> Reader:
    """Read one block per head, each with parts of the sizes that these attributes hold."""
    return lambda module, rows: (getattr(module, heads), tuple(getattr(module, size) for size in sizes))


def _parts(*sizes: str) -> Reader:
    """Read consecutive parts of the sizes that these attributes hold."""
    return lambda module, rows: (1, tuple(getattr(module, size) for size in sizes))


def _split_size(module: Any, rows: int) -> Layout:
    """GPT-2: parts of `split_size` (three, or key and value in cross-attention)."""
    return 1, (module.split_size,) * (rows // module.split_size)


def _grouped_query(module: Any, rows: int) -> Layout:
    """Phi-3, DBRX: all query heads, then all key heads, then all value heads."""
    heads = module.num_heads if hasattr(module, "num_heads") else module.config.num_attention_heads
    key_rows = module.num_key_value_heads * module.head_dim
    return 1, (heads * module.head_dim, key_rows, key_rows)


def _gpt_bigcode(module: Any, rows: int) -> Layout:
    """GPT-BigCode: one key and value for all queries, or (query, key, value) per head."""
    if module.is_cross_attention:
        raise AttributeError("cross-attention of GPT-BigCode has no documented split")
    if module.multi_query:
        return 1, (module.embed_dim, module.kv_dim, module.kv_dim)
    return module.num_heads, (module.head_dim,) * 3


def _falcon(module: Any, rows: int) -> Layout:
    """Falcon: queries grouped by their key head; or all queries and one key head; or per head."""
    if module.new_decoder_architecture:
        queries = module.num_heads // module.num_kv_heads
        return module.num_kv_heads, (queries * module.head_dim, module.head_dim, module.head_dim)
    if module.multi_query:
        return 1, (module.num_heads * module.head_dim, module.head_dim, module.head_dim)
    return module.num_heads, (module.head_dim,) * 3


def _codegen(module: Any, rows: int) -> Layout:
    """CodeGen: four slices (its training layout), each with query, value, key."""
    slices = 4  # a constant of the module's forward pass
    return slices, (module.embed_dim // slices,) * 3


def _latent_kv(module: Any, rows: int) -> Layout:
    """Multi-head latent attention: the position-free key and the value of each head."""
    head = module.qk_nope_head_dim + module.v_head_dim
    return rows // head, (module.qk_nope_head_dim, module.v_head_dim)


def _mamba2(module: Any, rows: int) -> Layout:
    """Mamba-2: gate, input, B, C, time step."""
    state = module.n_groups * module.ssm_state_size
    return 1, (module.intermediate_size, module.intermediate_size, state, state, module.num_heads)


def _delta_net_qkvz(module: Any, rows: int) -> Layout:
    """Qwen3-Next: query, key, value, z for each key head."""
    values = module.head_v_dim * (module.num_v_heads // module.num_k_heads)
    return module.num_k_heads, (module.head_k_dim, module.head_k_dim, values, values)


def _delta_net_ba(module: Any, rows: int) -> Layout:
    """Qwen3-Next: b and a for each key head."""
    return module.num_k_heads, (module.num_v_heads // module.num_k_heads,) * 2


def _experts(module: Any, rows: int) -> Layout:
    """Experts of the transformers 5 interface: its flag says whether gate and up alternate by row."""
    if not module.has_gate:
        raise AttributeError("experts without a gate hold one matrix")
    return (1, (rows // 2,) * 2) if module.is_concatenated else (rows // 2, (1, 1))


_VISION_QKV = """
BlipAttention Blip2Attention CohereCompassVisionAttention DeepseekOcr2SamVisionAttention Dots3NoteVisionAttention
Ernie4_5_VLMoeVisionAttention Florence2VisionChannelAttention Florence2VisionWindowAttention Glm4vVisionAttention
Glm4vMoeVisionAttention Glm5NextVisionAttention GlmImageVisionAttention GlmOcrVisionAttention GotOcr2VisionAttention
HieraMaskUnitAttention InstructBlipAttention InstructBlipVideoAttention MgpstrAttention PPFormulaNetVisionAttention
PPOCRV5MobileRecAttention PPOCRV5ServerRecAttention PPOCRV6SmallRecAttention Qwen2_5_VLVisionAttention VisionAttention
Qwen3_5VisionAttention Qwen3_5MoeVisionAttention Qwen3OmniMoeVisionAttention Qwen3VLVisionAttention
Qwen3VLMoeVisionAttention Qwen4ExpVisionAttention SamVisionAttention Sam2MultiScaleAttention SamHQVisionAttention
SegGptAttention SLANeXtVisionAttention TimesformerSelfAttention UnlimitedOcrSamVisionAttention VitDetAttention"""
_GATE_UP = """
DiaMLP Dots3NoteAudioMLP EsmFold2SwiGLU GlmMLP Glm4MLP Glm4vTextMLP GlmImageTextMLP GlmOcrTextMLP MiniMaxM3VLDenseMLP
Phi3MLP Phi4MultimodalAudioMLP Phi4MultimodalMLP Zamba2MLP"""
_LATENT_ATTENTION = """
DeepseekV2Attention DeepseekV3Attention DeepseekV32Attention YoutuAttention LongcatFlashMLA Glm4MoeLiteAttention
MiniCPM3Attention Mistral4Attention KimiLinearAttention AXK1Attention AXK2Attention BailingHybridAttention
Dots3NoteTextAttention Glm5NextTextAttention GlmMoeDsaAttention HYV4Attention HYV4VLAttention
MistralLarge4TextAttention"""
_PER_HEAD_QKV = "BloomAttention PersimmonAttention"

_TABLE: list[tuple[str, str, Reader]] = [
    # classes, attribute, how to read it
    ("GPT2Attention DecisionTransformerGPT2Attention ImageGPTAttention Attention", "c_attn", _split_size),
    ("GPTBigCodeAttention", "c_attn", _gpt_bigcode),
    (_PER_HEAD_QKV, "query_key_value", _per_head("num_heads", "head_dim", "head_dim", "head_dim")),
    ("GPTNeoXAttention", "query_key_value", lambda m, rows: (rows // (3 * m.head_size), (m.head_size,) * 3)),
    (
        "GPTNeoXJapaneseAttention",
        "query_key_value",
        _per_head("num_attention_heads", "head_size", "head_size", "head_size"),
    ),
    ("FalconAttention FalconFlashAttention2", "query_key_value", _falcon),
    ("Phi3Attention Phi4MultimodalAttention", "qkv_proj", _grouped_query),
    ("CodeGenAttention", "qkv_proj", _codegen),
    (
        "MiniMaxLightningAttention",
        "qkv_proj",
        _per_head("num_attention_heads", "head_dim", "head_dim", "head_dim"),
    ),
    ("DbrxAttention", "Wqkv", _grouped_query),
    ("MptAttention ModernBertAttention", "Wqkv", _consecutive(3)),
    (_VISION_QKV, "qkv", _consecutive(3)),
    ("Exaone4_5_VisionAttention", "qkv", _parts("q_dim", "kv_dim", "kv_dim")),
    ("LayoutLMv2SelfAttention", "qkv_linear", _consecutive(3)),
    ("MultiheadAttention", "in_proj_weight", _consecutive(3)),
    ("DisentangledSelfAttention", "in_proj", lambda m, rows: (m.num_attention_heads, (m.attention_head_size,) * 3)),
    ("JetMoeAttention", "kv_proj", _parts("kv_projection_size", "kv_projection_size")),
    (
        "EvollaSequenceCompressorAttention GraniteSpeechConformerAttention GraniteSpeechPlusConformerAttention",
        "to_kv",
        _consecutive(2),
    ),
    (
        "Qwen3NextAttention Qwen3_5Attention Qwen3_5MoeAttention",
        "q_proj",  # query and output gate of each head
        lambda m, rows: (rows // (2 * m.head_dim), (m.head_dim,) * 2),
    ),
    ("AXK2Attention", "q_gate_proj", _per_head("num_heads", "qk_head_dim", "v_head_dim")),
    (_LATENT_ATTENTION, "kv_a_proj_with_mqa", _parts("kv_lora_rank", "qk_rope_head_dim")),
    (_LATENT_ATTENTION, "kv_b_proj", _latent_kv),
    (_GATE_UP, "gate_up_proj", _consecutive(2)),
    ("GraniteMoeSWAMLP GraniteMoeHybridMLP GraniteMoeSharedMLP JetMoeMoE", "input_linear", _consecutive(2)),
    ("ModernBertMLP ModernBertDecoderMLP", "Wi", _consecutive(2)),
    ("MoshiGatingMLP KyutaiSpeechToTextGatingMLP", "fc1", _consecutive(2)),
    ("MambaMixer FalconMambaMixer JambaMambaMixer", "in_proj", _consecutive(2)),
    ("ZambaMambaMixer", "in_proj", _interleaved(2)),
    (
        "Mamba2Mixer BambaMixer GraniteMoeHybridMambaLayer FalconH1Mixer NemotronHMamba2Mixer Zamba2MambaMixer",
        "in_proj",
        _mamba2,
    ),
    ("Lfm2ShortConv Lfm2MoeShortConv Lfm3ShortConv Lfm3VlVisionShortConv", "in_proj", _consecutive(3)),
    ("Qwen3NextGatedDeltaNet", "in_proj_qkvz", _delta_net_qkvz),
    ("Qwen3NextGatedDeltaNet", "in_proj_ba", _delta_net_ba),
    (
        "Qwen3_5GatedDeltaNet Qwen3_5MoeGatedDeltaNet LaraMiniGatedDeltaNet Qwen4ExpTextGatedDeltaNet",
        "in_proj_qkv",
        _parts("key_dim", "key_dim", "value_dim"),
    ),
    ("Llama4TextExperts LongcatFlashExperts", "gate_up_proj", _consecutive(2)),
]
_LAYOUTS: dict[tuple[str, str], Reader] = {
    (name, leaf): reader for names, leaf, reader in _TABLE for name in names.split()
}


def known_layouts() -> list[tuple[str, str]]:
    """Return every `(class name, attribute)` that has a known split, for the docs and the tests."""
    return sorted(_LAYOUTS)


def has_layout(name: str, leaf: str) -> bool:
    """Return whether `leaf` of the class called `name` has a known split."""
    return (name, leaf) in _LAYOUTS


def split_fused(site: Site, view: MatrixView, shape: tuple[int, ...]) -> MatrixView:
    """Return `view` with the parts of a fused projection, or `view` itself where it is one matrix.

    A LoRA `B` matrix has the output rows of the projection it adapts, so it is split like it; `A` is shared.

    Args:
        site: where the tensor lives.
        view: the layout of the storage so far (transposed, stacked, ...).
        shape: the whole shape of the tensor.
    """
    if site.lora and site.lora != "B":
        return view
    runner, leaf = runner_of(site)
    rows = view.matrix_shapes(shape)[0][1]
    reader = _reader(runner, leaf)
    if site.adapted and rows != _output_rows(runner, leaf):
        return view  # the adapter takes inputs for outputs: its `B` has other rows
    if reader is None:
        if _LOOKS_FUSED.search(leaf):
            note_left_whole(class_name(runner), leaf, "no layout is known for it")
        return view
    try:
        groups, parts = reader(runner, rows)
        split = dataclasses.replace(view, groups=int(groups), parts=tuple(int(rows) for rows in parts))
        split.matrix_shapes(shape)
    except (AttributeError, TypeError, ValueError, ZeroDivisionError) as error:
        note_left_whole(class_name(runner), leaf, str(error))
        return view
    return split


def _output_rows(module: nn.Module, leaf: str) -> int:
    shape = true_shape(getattr(module, leaf))
    view = known_raw_view(module, leaf, shape)
    return 0 if view is None else view.matrix_shapes(shape)[0][1]


def _reader(runner: nn.Module, leaf: str) -> Reader | None:
    if leaf == "gate_up_proj" and hasattr(runner, "is_concatenated") and hasattr(runner, "has_gate"):
        return _experts
    # Only the very classes that were read: a subclass, or remote code with the same name, may run it differently.
    return _LAYOUTS.get((class_name(runner), leaf)) if is_upstream(runner) else None


def is_upstream(module: nn.Module) -> bool:
    """Return whether the class of `module` is transformers' or torch's own, not remote code of the same name."""
    name = class_name(module)
    sources = [cls.__module__ for cls in type(module).__mro__ if cls.__name__ == name]
    return any(source.startswith(("transformers.models.", "torch.nn.")) for source in sources)


def runner_of(site: Site) -> tuple[nn.Module, str]:
    """Return the module whose forward pass runs the projection, and the projection's name there."""
    if site.adapted is not None:
        return site.adapted[:2]
    if site.leaf == "weight" or site.lora:
        return site.logical_parent, site.logical_path.rpartition(".")[2]
    return site.module, site.leaf


@functools.cache
def note_left_whole(class_name: str, leaf: str, why: str) -> None:
    """Say once that a projection which looks as if it held several matrices is taken as one."""
    logger.info("%s.%s is orthogonalized as one matrix: %s.", class_name, leaf, why)
