# SPDX-License-Identifier: Apache-2.0
"""Decide for one tensor: Muon or AdamW, by which rule. Module types first, names second."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from .layouts import known_raw_view
from .sites import Site, TensorSites, class_name, class_names, true_shape
from .views import MatrixView

_CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

# Class names that transformers' models share; the class decides, whatever the attribute is called.
_NORM_CLASS = re.compile(r"Norm(?:\d*[dD]?|Gated|[A-Z]\w*)?$")
_EMBEDDING_CLASS = re.compile(
    r"(?:Embeddings?|Embedder|PatchEmbed|PatchEmbedder|EmbeddingTable)$|PatchEmbeddings?\w*$"
)
_ROUTER_CLASS = re.compile(r"Router$|TopKGating$|(?:MoE|Moe|Expert)\w*Gate$")
_HEAD_CLASS = re.compile(r"(?:PredictionHead(?:Transform)?|LMHead|MLMHead|ClassificationHead|PreTrainingHeads)$")
_EXPERT_CLASS = re.compile(r"Experts?(?:$|[A-Z])")

# Names: second line only, for modules whose class says no more than "Linear".
_HEAD_NAMES = frozenset(
    {
        "bbox_predictor",
        "class_labels_classifier",
        "classification_head",
        "classifier",
        "cls",
        "codebooks_head",
        "ctc_head",
        "ctc_proj",
        "decoder_pred",
        "discriminator_predictions",
        "embed_out",
        "generator_lm_head",
        "generator_predictions",
        "heads",
        "lm_head",
        "lm_heads",
        "lm_loss",
        "logits_proj",
        "mlm_head",
        "multiple_choice_head",
        "nsp_head",
        "output_projection",
        "pre_classifier",
        "pred_layer",
        "prediction_logits",
        "predictions",
        "qa_classifier",
        "qa_outputs",
        "score",
        "seq_relationship",
        "sequence_summary",
        "vocab_projector",
        "vocab_transform",
    }
)
_ROUTER_NAMES = frozenset({"router", "router_proj", "shared_expert_gate"})
_EMBEDDING_NAME = re.compile(
    r"(?:^|_)(?:emb|embed|embeds|embedding|embeddings|bias_table|rel_pos|probe|wte|wpe|cls_token|mask_token|distillation_token|pos_embed"
    r"|position_embeddings?|positional_embeddings?|relative_attention_bias|register_tokens|query_tokens|latents)(?:_|$)"
)
_SSM_NAMES = frozenset(
    {"A_log", "D", "dt_bias", "time_decay", "time_first", "time_mix_key", "time_mix_receptance", "time_mix_value"}
)


@dataclass(frozen=True)
class Verdict:
    """What a rule says: `use_muon`, the `role` it saw, its text, and how to read the storage as matrices."""

    use_muon: bool
    role: str
    rule: str
    view: MatrixView = field(default_factory=MatrixView)


def decide(tensor: TensorSites, roles: dict[int, str], *, flatten_conv: bool = False) -> Verdict:
    """Apply the rules to one tensor.

    Args:
        tensor: the tensor and every place that holds it; one embedding or head among them settles it.
        roles: `embedding_and_head_ids(model)`.
        flatten_conv: put dense convolution kernels on Muon as matrices.
    """
    shape = true_shape(tensor.parameter)
    role = roles.get(id(tensor.parameter))
    verdicts = [_decide_site(site, shape) for site in tensor.sites]
    if role == "embedding" and verdicts[0].role != "norm":
        return Verdict(False, role, "input embedding of the model (get_input_embeddings)")
    for verdict in verdicts:
        if verdict.role in ("embedding", "head"):
            return verdict
    if role == "head":
        return Verdict(False, role, "output embedding or task head of the model")
    if flatten_conv and verdicts[0].role == "convolution":
        return _flattened_kernel(tensor.sites[0], shape)
    return verdicts[0]


def matrix_view(site: Site, shape: tuple[int, ...]) -> MatrixView:
    """Return the view for a tensor that someone puts on Muon against the rules, `fused` parts aside.

    Raises:
        ValueError: the tensor holds no matrix.
    """
    if len(shape) < 2 or min(shape) == 0:
        raise ValueError(
            f"{site.name} must have at least two axes to be on Muon; got shape {shape}. "
            "Leave it on AdamW: narrow `include`, or do not set use_muon."
        )
    if (known := known_raw_view(site.module, site.leaf, shape)) is not None:
        return known
    if _is_conv1d_of_gpt2(site.module):
        return MatrixView(transposed=True)
    if isinstance(site.module, _CONVOLUTIONS):
        return kernel_view(site.module, shape)
    if len(shape) > 3:
        raise ValueError(
            f"{site.name} must have two axes, or three with a batch in front, to be on Muon; got shape {shape}. "
            "Leave it on AdamW: narrow `include`, or do not set use_muon."
        )
    return MatrixView()


def kernel_view(module: nn.Module, shape: tuple[int, ...]) -> MatrixView:
    """Return a convolution kernel as the matrix that maps patches: (out, in*k), transposed ones (out*k, in)."""
    return MatrixView(flatten=len(shape) > 2, transposed=isinstance(module, _TRANSPOSED))


def _flattened_kernel(site: Site, shape: tuple[int, ...]) -> Verdict:
    module = site.module
    if (around := _by_surroundings(site, shape)) is not None:
        return around  # patch embeddings and heads stay on AdamW whatever they are made of
    if module.groups != 1:
        return Verdict(False, "convolution", f"depthwise or grouped convolution ({class_name(module)})")
    view = kernel_view(module, shape)
    if 1 in view.matrix_shapes(shape)[0][1:]:
        return Verdict(False, "convolution", f"convolution with a single row or column ({class_name(module)})")
    read = "(out * kernel, in)" if view.transposed else "(out, in * kernel)"
    return Verdict(True, "convolution", f"convolution read as {read} ({class_name(module)})", view)


def _decide_site(site: Site, shape: tuple[int, ...]) -> Verdict:
    for rule in (_by_adapter, _by_shape_and_type, _by_surroundings, _by_matrix_type):
        if (verdict := rule(site, shape)) is not None:
            return verdict
    return Verdict(
        False, "other", f"no rule knows {class_name(site.module)}.{site.leaf}: AdamW, `include` switches it"
    )


def _by_adapter(site: Site, shape: tuple[int, ...]) -> Verdict | None:
    if site.lora.startswith("embedding"):
        return Verdict(False, "embedding", f"LoRA pair of an embedding (lora_{site.lora})")
    if site.lora == "magnitude_vector":
        return Verdict(False, "vector", "DoRA magnitude vector")
    return None


def _by_shape_and_type(site: Site, shape: tuple[int, ...]) -> Verdict | None:
    module = site.module
    if _is_norm(module):
        return Verdict(False, "norm", f"norm ({class_name(module)})")
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return Verdict(False, "embedding", f"embedding module ({class_name(module)})")
    if _is_bias(site.leaf):
        return Verdict(False, "bias", f"bias ({site.leaf})")
    if len(shape) < 2:
        return Verdict(False, "vector", "fewer than two axes")
    if isinstance(module, _CONVOLUTIONS):
        kind = "depthwise convolution" if module.groups > 1 else "convolution"
        return Verdict(False, "convolution", f"{kind} ({class_name(module)})")
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return Verdict(False, "recurrent", f"recurrent layer ({class_name(module)})")
    if site.leaf in _SSM_NAMES:
        return Verdict(False, "ssm", f"state-space parameter ({site.leaf})")
    return None


def _by_surroundings(site: Site, shape: tuple[int, ...]) -> Verdict | None:
    chain = (site.module, *reversed(site.ancestors))
    for module in chain:
        if hasattr(module, "get_input_embeddings"):
            break  # a whole model: its class name says nothing about one tensor
        if _ROUTER_CLASS.search(class_name(module)):
            return Verdict(False, "router", f"router ({class_name(module)})")
        if _HEAD_CLASS.search(class_name(module)):
            return Verdict(False, "head", f"head ({class_name(module)})")
        if _EMBEDDING_CLASS.search(class_name(module)):
            return Verdict(False, "embedding", f"inside an embedding module ({class_name(module)})")
    path = site.logical_path.split(".")
    if head := _first_in(path, _HEAD_NAMES):
        return Verdict(False, "head", f"head (inside {head!r})")
    if path[-1] in _ROUTER_NAMES or (path[-1] == "gate" and _has_experts(site.logical_parent)):
        return Verdict(False, "router", f"router (named {path[-1]!r})")
    if not isinstance(site.module, nn.Linear) and _EMBEDDING_NAME.search(site.leaf):
        return Verdict(False, "embedding", f"learned embedding ({site.leaf})")
    return None


def _by_matrix_type(site: Site, shape: tuple[int, ...]) -> Verdict | None:
    module = site.module
    if 1 in shape[-2:] and site.leaf == "weight" and len(shape) == 2:
        return Verdict(False, "vector", "a single row or column has no spectrum")
    if (view := known_raw_view(module, site.leaf, shape)) is not None:
        kind = "expert matrices" if _EXPERT_CLASS.search(class_name(module)) else "stored matrices"
        is_routed = kind[0] == "e" and _is_routed(module, shape, view)
        return Verdict(
            True,
            "experts" if kind[0] == "e" else "matrix",
            f"{kind} ({class_name(module)}.{site.leaf})",
            dataclasses.replace(view, routed=is_routed),
        )
    if site.leaf == "weight" and _is_conv1d_of_gpt2(module):
        return Verdict(True, "matrix", "Conv1D, stored (in, out)", MatrixView(transposed=True))
    if site.leaf == "weight" and _is_linear(module, shape):
        what = f"LoRA matrix (lora_{site.lora})" if site.lora else f"linear layer ({class_name(module)})"
        return Verdict(True, "lora" if site.lora else "matrix", what, _adapter_view(site))
    return None


def _is_routed(module: nn.Module, shape: tuple[int, ...], view: MatrixView) -> bool:
    """Tell stacks of which a router uses a part from shared experts, which always run."""
    return (len(shape) == 3 or view.stack > 1) and "Shared" not in class_name(module)


def _adapter_view(site: Site) -> MatrixView:
    """Return the view of a LoRA matrix: one matrix, or one per expert of the stack that PEFT adapts."""
    if site.adapted is None:
        return MatrixView()
    count = site.adapted[2]
    return MatrixView(stack=count, routed=True) if site.lora == "A" else MatrixView(alternating=count, routed=True)


def _is_norm(module: nn.Module) -> bool:
    if isinstance(module, (nn.Linear, nn.Embedding, nn.LayerNorm, nn.GroupNorm)):
        return isinstance(module, (nn.LayerNorm, nn.GroupNorm))
    return any(_NORM_CLASS.search(name) for name in class_names(module)[:2])


def _is_bias(leaf: str) -> bool:
    return leaf == "bias" or leaf.endswith("_bias") or leaf.startswith(("bias_", "pos_bias_", "in_proj_bias"))


def _is_linear(module: nn.Module, shape: tuple[int, ...]) -> bool:
    if isinstance(module, nn.Linear):
        return len(shape) == 2
    sizes = (getattr(module, "out_features", None), getattr(module, "in_features", None))
    return any("Linear" in name for name in class_names(module)) and shape == sizes


def _is_conv1d_of_gpt2(module: nn.Module) -> bool:
    return "Conv1D" in class_names(module) and hasattr(module, "nf") and not isinstance(module, _CONVOLUTIONS)


def _has_experts(module: nn.Module) -> bool:
    return any(hasattr(module, name) for name in ("experts", "num_experts", "n_routed_experts", "local_experts"))


def _first_in(path: Iterable[str], names: frozenset[str]) -> str | None:
    return next((piece for piece in path if piece in names), None)
