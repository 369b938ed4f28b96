# SPDX-License-Identifier: Apache-2.0
"""Bytes of activations per token, from a transformers configuration: formulas counted from the modeling code.

Per token and layer in bfloat16, with flash attention (nothing of size tokens x tokens is kept); H hidden size, I
intermediate size, q and kv the widths of queries and of keys:

- each RMS norm keeps its input in float32 (4H), the normalised input (2H), and its result, which the projections read
  (2H): two of them, 16H + 8;
- attention keeps queries, keys and values after rotation, its result, and one float32 per head: 4q + 4kv + 4 heads;
- a gated MLP keeps gate, its activation, up and their product: 8I.

With checkpointing a layer keeps its input, 2H. The head keeps float32 log-probabilities (4 V per token); their
backward allocates two more of that size. `tests/unit/planning/test_memory.py` holds these to the fake-tensor run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Decoders of the Llama family as transformers writes them: RMS norms, rotary attention, a gated MLP.
DENSE = frozenset({"llama", "qwen2", "mistral", "smollm3"})


@dataclass(frozen=True)
class ActivationBytes:
    """Activations of one rank's batch, in bytes.

    Attributes:
        layers: what all layers keep for backward.
        head: the last norm and the log-probabilities.
        loss: temporaries of the loss's backward.
        recomputed: what one layer allocates again in backward; 0 without checkpointing.
        layer: what one layer keeps while its backward runs.
        layer_backward: temporaries of one layer's backward.
    """

    layers: int = 0
    head: int = 0
    loss: int = 0
    recomputed: int = 0
    layer: int = 0
    layer_backward: int = 0

    @property
    def peak(self) -> int:
        """Bytes when the backward of the loss runs."""
        return self.layers + self.head + self.loss


def estimate_activations(
    config: Any, micro_batch: int, seq_len: int, *, checkpointing: bool
) -> ActivationBytes | None:
    """Return the activation bytes of a batch, None for an architecture without a formula.

    Args:
        config: a transformers configuration, or None.
        micro_batch: sequences per rank.
        seq_len: tokens per sequence.
        checkpointing: whether each layer is recomputed in backward.
    """
    if getattr(config, "model_type", None) not in DENSE:
        return None
    tokens = micro_batch * seq_len
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or hidden // heads
    query, key = heads * head_size, config.num_key_value_heads * head_size
    layer = tokens * (16 * hidden + 8 + 4 * query + 4 * key + 4 * heads + 8 * inner)
    kept = tokens * 2 * hidden if checkpointing else layer
    return ActivationBytes(
        layers=kept * config.num_hidden_layers,
        head=tokens * (8 * hidden + 4 + 4 * config.vocab_size),
        loss=tokens * 8 * config.vocab_size,
        recomputed=layer if checkpointing else 0,
        layer=layer,
        # Gradients of the MLP's product, of both its factors, and of what enters the layer.
        layer_backward=tokens * (6 * inner + 4 * hidden),
    )
