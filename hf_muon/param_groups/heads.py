# SPDX-License-Identifier: Apache-2.0
"""`matrix_split=per_head`: query, key and value projections as one matrix per attention head.

GLM-5 calls it Muon Split (arXiv:2602.15763): the up-projections of the queries, keys and values are orthogonalized
head by head, so that heads may move at different scales. The output projection stays whole, as there: it mixes all
heads into one residual stream, and the scale of each head's output is already free through its value rows. Gates,
down-projections of latent attention and everything outside attention keep what `fused` gives them.

Separate projections: transformers' attention modules lay their heads one after the other, `rows = heads * size`,
whether the heads are queries or (fewer) keys and values; the size comes from the instance. Fused ones are split into
query, key and value first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from .fused import has_layout, is_upstream, note_left_whole, runner_of
from .sites import Site, class_name
from .views import MatrixView

_QUERY_KEY_NAMES = """
q_proj k_proj q_b_proj query key q_lin k_lin query_proj key_proj q k to_q to_k query_global key_global"""
_VALUE_NAMES = "v_proj value v_lin value_proj v to_v value_global"
_FUSED_NAMES = """
c_attn query_key_value qkv_proj Wqkv qkv qkv_linear in_proj_weight in_proj kv_proj to_kv kv_b_proj q_proj q_gate_proj
in_proj_qkvz in_proj_qkv"""
_VALUES = frozenset(_VALUE_NAMES.split())
_SEPARATE = _VALUES | frozenset(_QUERY_KEY_NAMES.split())
_FUSED = frozenset(_FUSED_NAMES.split())
# What attention modules call the rows of one head and the number of query heads.
_SIZES = ("head_dim", "attention_head_size", "key_value_proj_dim", "dim_head", "d_head", "head_size")
_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "num_k_heads")
_KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "num_key_value_groups")


def split_heads(site: Site, view: MatrixView, shape: tuple[int, ...]) -> MatrixView:
    """Return `view` with the heads of a query, key or value projection, or `view` itself for any other tensor.

    Args:
        site: where the tensor lives.
        view: the layout so far, fused parts included.
        shape: the whole shape of the tensor.
    """
    runner, leaf = runner_of(site)
    fused = bool(view.parts) and leaf in _FUSED
    if (site.lora and site.lora != "B") or not (fused or (not view.parts and leaf in _SEPARATE)):
        return view
    if fused and not _is_attention(runner, leaf):
        return view
    try:
        if not is_upstream(runner):
            raise ValueError("its code was not read")
        rows = [m for _, m, _ in view.matrix_shapes(shape)]
        sizes = _fused_sizes(runner, leaf, view, rows) if fused else (_size(runner, leaf, rows[0]),)
        split = dataclasses.replace(view, head_rows=tuple(sizes))
        split.matrix_shapes(shape)
    except (AttributeError, TypeError, ValueError, ZeroDivisionError) as error:
        note_left_whole(class_name(runner), leaf, f"heads unknown, {error}")
        return view
    return split


def _is_attention(runner: Any, leaf: str) -> bool:
    """Tell projections of attention from those that share a name (`in_proj` of Mamba and of short convolutions)."""
    name = class_name(runner)
    return has_layout(name, leaf) and any(word in name for word in ("Attention", "MLA", "DeltaNet"))


def _fused_sizes(runner: Any, leaf: str, view: MatrixView, rows: Sequence[int]) -> Sequence[int]:
    """Return the rows of a head in each part; 0 keeps a part (a gate) whole."""
    if leaf == "kv_b_proj":
        return view.parts  # (position-free key, value) of each head
    if leaf in ("q_proj", "q_gate_proj"):
        return view.parts[0], 0  # query and output gate of each head
    if leaf in ("in_proj_qkvz", "in_proj_qkv"):
        return (runner.head_k_dim, runner.head_k_dim, runner.head_v_dim, 0)[: len(view.parts)]
    return [_size(runner, leaf, count) for count in rows]


def _size(runner: Any, leaf: str, rows: int) -> int:
    """Return the rows of one head of a projection with `rows` rows, checked against the number of heads.

    Raises:
        ValueError: the module does not say, or what it says does not fit.
    """
    config = getattr(runner, "config", None)
    counts = [n for owner in (runner, config) for n in _positive_numbers(owner, _COUNTS)]
    own = "v_head_dim" if leaf in _VALUES else "qk_head_dim"
    size = next(iter(_positive_numbers(runner, (own, *_SIZES))), None)
    grouped = any(hasattr(owner, name) for owner in (runner, config) for name in _KEY_COUNTS)
    if size is None and counts and not grouped and rows % counts[0] == 0:
        size = rows // counts[0]  # as many keys as queries: the count says it all
    if size is None:
        raise ValueError("the module names no head size")
    if rows % size or (counts and all(count % (rows // size) for count in counts)):
        raise ValueError(f"{rows} rows are no heads of {size} for {' or '.join(map(str, counts))} query heads")
    return size


def _positive_numbers(owner: Any, names: Sequence[str]) -> list[int]:
    values = (getattr(owner, name, None) for name in names)
    return [value for value in values if isinstance(value, int) and value > 0]
