# SPDX-License-Identifier: Apache-2.0
"""Watches the attention of a transformers model for `qk_clip`: largest logit per head, and which rows scale it."""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat_attention import observe_attention
from ...optim import MuonWithAuxAdam
from ...optim.qk_clip import AttentionLogits, ForwardPass, HeadRows, QKClip, React
from .forward_replay import ForwardReplay

EXACT = ("eager", "sdpa")  # implementations whose queries, keys and masks say all about their logits
CHUNK_BYTES = 64 * 2**20  # of logits alive at once
_MASKED_BELOW = -1e4  # an additive mask hides by the most negative number of its dtype; biases are far above this
_NORM = re.compile(r"(q|k|qk|query|key)_?(layer_?)?norm")
_PAIRS = (("q_proj", "k_proj"), ("query", "key"))


def attach_qk_clip(model: nn.Module, optimizer: MuonWithAuxAdam) -> None:
    """Let `optimizer` clip the attention logits of `model` at its `qk_clip`. `OptimizerFactory` calls it.

    Args:
        model: a transformers model, not yet wrapped; its parameters are known to the optimizer by name.
        optimizer: with `qk_clip` set.

    Raises:
        NotImplementedError: the model's queries and keys cannot be rescaled by rows of their projections; named.
        ValueError: `qk_clip` is not set, or the optimizer has no names.
    """
    threshold = optimizer.config.qk_clip
    if threshold is None:
        raise ValueError("qk_clip must be set on the optimizer; got None. Build it with qk_clip=100, for instance.")
    names = {name for group in optimizer.param_groups for name in group.get("param_names", ())}
    exact = optimizer.config.qk_clip_exact
    optimizer.qk_clip = QKClip(threshold, AttentionRecorder(model, names, keep_passes=exact), exact)


class AttentionRecorder:
    """Keeps the largest logits per head of the attention modules of one model.

    Args:
        model: with attention modules whose queries and keys come from projections of their own.
        trained: names of the parameters that may be rescaled.
        keep_passes: keep the forward passes of a step for `take_passes`.

    Raises:
        NotImplementedError: see `attach_qk_clip`.
    """

    def __init__(self, model: nn.Module, trained: set[str], keep_passes: bool = False) -> None:
        self._largest: dict[str, Tensor] = {}
        self._replay = ForwardReplay(model) if keep_passes else None
        self._react: React | None = None  # while a pass is run again
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._heads: dict[str, tuple[int, tuple[HeadRows, ...]]] = {}  # by module name, in the order of the model
        for name, module in model.named_modules():
            if projections(module) is not None:
                check_can_scale(name, module, trained)
                self._names[module] = name
                self._heads[name] = head_rows(name, module)
        if not self._names:
            raise NotImplementedError(
                f"qk_clip must find separate query and key projections (q_proj and k_proj, query and key, or"
                f" multi-head latent attention); got none in {type(model).__name__}. Leave qk_clip out."
            )
        recorder = weakref.ref(self)

        @torch.compiler.disable
        def observe(how: str, module: Any, query: Any, key: Any, mask: Any, options: dict[str, Any]) -> Tensor | None:
            present = recorder()
            if present is None or module not in present._names:
                return None
            counts = module.training or torch.is_grad_enabled() or present._react is not None
            return present.record(how, module, query, key, mask, options) if counts else None

        weakref.finalize(self, observe_attention(observe))

    @torch.no_grad()
    def record(
        self, how: str, module: nn.Module, query: Tensor, key: Tensor, mask: Any, options: Any
    ) -> Tensor | None:
        """Note one attention of a training pass.

        Returns:
            Queries whose logits are those of the clipped weights where a pass is run again, else None.

        Raises:
            NotImplementedError: an implementation other than `eager` and `sdpa`; before anything was trained.
        """
        name = self._names[module]
        heads, _ = self._heads[name]
        if query.shape[1] != heads:
            raise NotImplementedError(
                f"{name} must attend with its {heads} heads for qk_clip; got {query.shape[1]}. Leave qk_clip out."
            )
        if how not in EXACT:
            raise NotImplementedError(
                f"{name} must use eager or sdpa attention for qk_clip; got {how}, which does not show its mask."
                ' Load the model with attn_implementation="sdpa", or leave qk_clip out.'
            )
        causal = how == "sdpa" and mask is None and query.shape[2] > 1
        if causal:
            given = options.get("is_causal")
            causal = bool(getattr(module, "is_causal", True) if given is None else given)
        scaling = options.get("scaling")
        largest = largest_logits(query, key, query.shape[-1] ** -0.5 if scaling is None else scaling, mask, causal)
        if self._react is not None:
            # Logits are bilinear, so it does not matter here on which side the factor is.
            return (query * self._react(name, largest)[:, None, None]).to(query.dtype)
        before = self._largest.get(name)
        self._largest[name] = largest if before is None else torch.maximum(before, largest)
        return None

    def take(self) -> Sequence[AttentionLogits]:
        """Return what was seen since the last call, in the order of the model; modules not run show -inf."""
        seen, self._largest = self._largest, {}
        if not seen:
            return ()
        device = next(iter(seen.values())).device
        nothing = torch.full((max(heads for heads, _ in self._heads.values()),), -torch.inf, device=device)
        return [
            AttentionLogits(name, seen[name].to(device) if name in seen else nothing[:heads], rows)
            for name, (heads, rows) in self._heads.items()
        ]

    def take_passes(self) -> Sequence[ForwardPass]:
        """Return the forward passes with gradients since the last call, and forget them."""
        return [functools.partial(self._run_again, run) for run in (self._replay.take() if self._replay else ())]

    def _run_again(self, run: Callable[[], None], react: React) -> None:
        self._react = react
        try:
            run()
        finally:
            self._react = None


def largest_logits(query: Tensor, key: Tensor, scaling: float, mask: Tensor | None, causal: bool) -> Tensor:
    """Return the largest scaled q·k per head over all pairs that the mask lets attend, without an (L, S) matrix.

    Args:
        query: (B, H, L, d), positions applied.
        key: (B, KV, S, d); H is a multiple of KV.
        scaling: factor on the products.
        mask: (B or 1, H or 1, L or 1, S or longer), boolean (true attends) or additive; None hides nothing.
        causal: query i sees keys up to i + S - L.

    Returns:
        (H,) float32, on the device of `query`; -inf for a head that attends to nothing.

    Note:
        One more product of queries and keys, about a third of the attention's forward pass, in the dtype of the
        queries (in bfloat16 the logits are rounded to 2**-9); at most 64 MiB of logits at once.
    """
    batch, heads, length, width = query.shape
    kv_heads, keys = key.shape[1:3]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, length, width)
    transposed = key.unsqueeze(2).mT  # (B, KV, 1, d, S)
    best = torch.full((kv_heads, heads // kv_heads), -torch.inf, device=query.device)
    rows = max(1, CHUNK_BYTES // max(1, batch * heads * keys * 4))
    columns = torch.arange(keys, device=query.device)
    for start in range(0, length, rows):
        stop = min(length, start + rows)
        seen = min(keys, stop + keys - length) if causal else keys  # keys after these are hidden from every row
        logits = (grouped[..., start:stop, :] @ transposed[..., :seen]).float() * scaling
        logits = logits.reshape(batch, heads, stop - start, seen)
        if causal:
            last = torch.arange(start, stop, device=query.device) + (keys - length)
            logits.masked_fill_(columns[:seen] > last[:, None], -torch.inf)
        if mask is not None:
            part = mask[..., start:stop, :seen] if mask.shape[-2] > 1 else mask[..., :seen]
            hidden = ~part if part.dtype == torch.bool else part < _MASKED_BELOW
            logits.masked_fill_(hidden, -torch.inf)
        best = torch.maximum(best, logits.amax(dim=(0, 2, 3)).reshape(best.shape))
    return best.flatten()


def projections(module: nn.Module) -> tuple[str, str] | None:
    """Return the attributes that make queries and keys in an attention module, or None where it is none."""
    if isinstance(getattr(module, "kv_b_proj", None), nn.Module):
        return ("q_b_proj" if isinstance(getattr(module, "q_b_proj", None), nn.Module) else "q_proj", "kv_b_proj")
    for query, key in _PAIRS:
        if isinstance(getattr(module, query, None), nn.Module) and isinstance(getattr(module, key, None), nn.Module):
            return query, key
    return None


def check_can_scale(name: str, module: nn.Module, trained: set[str]) -> None:
    """Raise where rescaling the projections of an attention module would not rescale its logits.

    Raises:
        NotImplementedError: normalised queries or keys, an adapter or another wrapper, frozen or unknown weights.
    """
    norms = [
        child
        for child, value in module.named_children()
        if _NORM.fullmatch(child) and not isinstance(value, nn.Identity)
    ]
    if norms or getattr(module, "qk_norm", None) is not None:
        raise NotImplementedError(
            f"{name} must not normalise queries and keys for qk_clip; got {' and '.join(norms) or 'qk_norm'}, which"
            " undo any scaling of the projections and bound the logits themselves. Leave qk_clip out."
        )
    for attribute in projections(module) or ():
        projection = getattr(module, attribute)
        if not isinstance(projection, nn.Linear):
            raise NotImplementedError(
                f"{name}.{attribute} must be a plain linear layer for qk_clip; got {type(projection).__name__}."
                " Leave qk_clip out when training adapters."
            )
        for leaf, parameter in projection.named_parameters(recurse=False):
            full = f"{name}.{attribute}.{leaf}" if name else f"{attribute}.{leaf}"
            if full not in trained:
                state = "one that is not in this optimizer" if parameter.requires_grad else "a frozen one"
                raise NotImplementedError(f"{full} must be trained for qk_clip; got {state}. Leave qk_clip out.")


def head_rows(name: str, module: nn.Module) -> tuple[int, tuple[HeadRows, ...]]:
    """Return the number of heads, and which rows of the projections scale the logits of which head by which power.

    Raises:
        NotImplementedError: rows that do not fit the heads.
    """
    query, key = projections(module) or ("", "")
    heads = num_heads(module)
    rows, key_rows = getattr(module, query).out_features, getattr(module, key).out_features
    width = rows // max(1, heads)
    if key == "kv_b_proj":  # the rotary part of the keys is shared by all heads and stays: queries take all of it
        nope, value = int(module.qk_nope_head_dim), int(module.v_head_dim)  # type: ignore[arg-type]
        shapes: dict[str, tuple[tuple[int, float], ...]] = {
            query: ((nope, 0.5), (width - nope, 1.0)),
            key: ((nope, 0.5), (value, 0.0)),
        }
        fits = heads > 0 and rows % heads == 0 and key_rows == heads * (nope + value)
    else:
        shapes = {query: ((width, 0.5),), key: ((width, 0.5),)} if key_rows == rows else {query: ((width, 1.0),)}
        fits = heads > 0 and rows % heads == 0 and key_rows % width == 0 and heads % (key_rows // width) == 0
    if not fits:
        raise NotImplementedError(
            f"{name} must have rows that its {heads} heads share evenly for qk_clip; got {rows} in {query} and"
            f" {key_rows} in {key}. Leave qk_clip out."
        )
    return heads, tuple(
        HeadRows(f"{name}.{attribute}.{leaf}" if name else f"{attribute}.{leaf}", segments)
        for attribute, segments in shapes.items()
        for leaf, _ in getattr(module, attribute).named_parameters(recurse=False)
    )


def num_heads(module: nn.Module) -> int:
    """Return the number of query heads of an attention module, 0 where nothing tells."""
    for place in (module, getattr(module, "config", None)):
        for attribute in ("num_heads", "num_attention_heads", "n_heads", "n_head"):
            if isinstance(found := getattr(place, attribute, None), int):
                return found
    return 0
