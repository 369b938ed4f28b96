# SPDX-License-Identifier: Apache-2.0
"""Known storage layouts: experts and other matrices that modules keep as raw parameters.

Each entry was read from the module's own forward pass. A module that is not listed gets no guess.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from .sites import class_name
from .views import MatrixView

# (class name, attribute) -> view, for modules whose instances carry no layout flags of their own.
_FIXED: dict[tuple[str, str], MatrixView] = {
    ("Llama4TextExperts", "gate_up_proj"): MatrixView(transposed=True),
    ("Llama4TextExperts", "down_proj"): MatrixView(transposed=True),
    ("JetMoeParallelExperts", "weight"): MatrixView(),
    ("InklingSharedExperts", "gate_proj"): MatrixView(),
    ("InklingSharedExperts", "up_proj"): MatrixView(),
    ("InklingSharedExperts", "down_proj"): MatrixView(),
    ("LongcatFlashExperts", "gate_up_proj"): MatrixView(),
    ("LongcatFlashExperts", "down_proj"): MatrixView(),
    ("MoshiFlexibleLinear", "weight"): MatrixView(),
    ("KyutaiSpeechToTextFlexibleLinear", "weight"): MatrixView(),
    ("GroupedLinearLayer", "weight"): MatrixView(transposed=True),
    ("MultiheadAttention", "in_proj_weight"): MatrixView(),
    ("MultiheadAttention", "q_proj_weight"): MatrixView(),
    ("MultiheadAttention", "k_proj_weight"): MatrixView(),
    ("MultiheadAttention", "v_proj_weight"): MatrixView(),
    ("XLNetRelativeAttention", "q"): MatrixView(flatten=True, transposed=True),
    ("XLNetRelativeAttention", "k"): MatrixView(flatten=True, transposed=True),
    ("XLNetRelativeAttention", "v"): MatrixView(flatten=True, transposed=True),
    ("XLNetRelativeAttention", "r"): MatrixView(flatten=True, transposed=True),
    ("XLNetRelativeAttention", "o"): MatrixView(flatten=True),
    ("FunnelRelMultiheadAttention", "r_kernel"): MatrixView(flatten=True, transposed=True),
}

# Layouts that need a number from the instance.
_FROM_INSTANCE: dict[tuple[str, str], Callable[[nn.Module], MatrixView]] = {
    ("DbrxExpertGLU", "w1"): lambda m: MatrixView(stack=int(m.moe_num_experts)),  # type: ignore[arg-type]
    ("DbrxExpertGLU", "v1"): lambda m: MatrixView(stack=int(m.moe_num_experts)),  # type: ignore[arg-type]
    ("DbrxExpertGLU", "w2"): lambda m: MatrixView(stack=int(m.moe_num_experts), transposed=True),  # type: ignore[arg-type]
    ("DeepseekV4GroupedLinear", "weight"): lambda m: MatrixView(stack=int(m.n_groups)),  # type: ignore[arg-type]
}

# What transformers' experts interface calls its matrices; `is_transposed` on the instance tells their layout.
_EXPERT_LEAVES = ("gate_up_proj", "up_proj", "gate_proj", "down_proj")


def known_raw_view(module: nn.Module, leaf: str, shape: tuple[int, ...]) -> MatrixView | None:
    """Return how `module.leaf` stores its matrices, or None where nobody has said so.

    Args:
        module: the module that holds the parameter.
        leaf: the attribute name.
        shape: the parameter's whole shape.
    """
    key = (class_name(module), leaf)
    if key in _FROM_INSTANCE:
        return _FROM_INSTANCE[key](module)
    if key in _FIXED:
        return _FIXED[key]
    transposed = getattr(module, "is_transposed", None)
    if len(shape) == 3 and leaf in _EXPERT_LEAVES and "Expert" in key[0]:
        # Without the flag the module is older than the experts interface: (experts, out, in) was the only layout.
        return MatrixView(transposed=bool(transposed))
    return None
