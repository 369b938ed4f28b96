# SPDX-License-Identifier: Apache-2.0
"""`explain_parameters` and `tag_parameters`: one row, and one tag, for every trainable tensor."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from ..config import check_choice, nearest
from .fused import split_fused
from .heads import split_heads
from .rules import Verdict, decide, matrix_view
from .sites import TensorSites, collect_tensors, embedding_and_head_ids, true_shape
from .views import MatrixView

logger = logging.getLogger("hf_muon.param_groups")

# In the models of docs/routing_table.md Muon covers more than half of what is neither embedding nor head; a share
# under this bound has always meant flattened parameters, convolutions, or experts that no rule knows.
LOW_COVERAGE = 0.30

_NO_DECAY_NAME = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)", re.IGNORECASE)
_OUTSIDE = ("embedding", "head")  # roles that never count as hidden


@dataclass(frozen=True)
class ParameterRow:
    """One trainable tensor and what happens to it.

    Attributes:
        name: fully qualified name, as in `named_parameters()`.
        shape: whole shape, also where the storage is partitioned.
        count: number of elements of that shape.
        algorithm: `muon` or `adamw`.
        rule: what decided.
        decay: whether weight decay applies (not to norms, biases, vectors).
        view: the matrices inside the tensor; meaningful on Muon only.
        role: `matrix`, `experts`, `lora`, `embedding`, `head`, `norm`, `bias`, `router`, ...
    """

    name: str
    shape: tuple[int, ...]
    count: int
    algorithm: str
    rule: str
    decay: bool
    view: MatrixView
    role: str = "other"

    @property
    def is_muon(self) -> bool:
        """Return whether the tensor is on Muon."""
        return self.algorithm == "muon"


@dataclass(frozen=True)
class Summary:
    """Totals over rows: tensors and elements on each side, and Muon's share of all and of the hidden elements."""

    muon_tensors: int
    muon_elements: int
    adamw_tensors: int
    adamw_elements: int
    share: float
    hidden_share: float


class _Tag(NamedTuple):
    """What this module wrote on a parameter, so that it can tell its own mark from the user's."""

    use_muon: bool
    user: bool | None  # what the user had set before


def explain_parameters(
    model: nn.Module,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    matrix_split: str = "auto",
    conv: str = "adamw",
) -> list[ParameterRow]:
    """Say for every trainable tensor which algorithm updates it, and why. Changes nothing.

    Args:
        model: any module; meta-device models and DeepSpeed ZeRO-3 partitions work, no data is read.
        include: regexes (`re.search` on the name) of tensors that must be on Muon.
        exclude: regexes of tensors that must be on AdamW; wins over `include`.
        matrix_split: `auto` or `fused` splits fused projections into their matrices, `per_head` splits query, key
            and value projections by attention head as well, `none` does neither.
        conv: `adamw`, or `flatten` for convolution kernels as (out, in * kernel) matrices on Muon.

    Returns:
        One row per tensor in `named_parameters()` order; a tied tensor stands once, frozen ones do not appear.

    Raises:
        ValueError: a pattern matches nothing, Muon was asked for on a tensor without a matrix, or FSDP1 hides
            the shapes.

    Note:
        Milliseconds per thousand tensors; no tensor is copied.
    """
    check_choice("matrix_split", matrix_split)
    check_choice("conv", conv)
    include = (include,) if isinstance(include, str) else tuple(include)
    exclude = (exclude,) if isinstance(exclude, str) else tuple(exclude)
    tensors = collect_tensors(model)
    _check_patterns("include", include, tensors, model)
    _check_patterns("exclude", exclude, tensors, model)
    roles = embedding_and_head_ids(model)
    rows = []
    for tensor in tensors:
        verdict = _override(tensor, decide(tensor, roles, flatten_conv=conv == "flatten"), include, exclude)
        rows.append(_row(tensor, verdict, matrix_split))
    return rows


def tag_parameters(
    model: nn.Module,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    matrix_split: str = "auto",
    conv: str = "adamw",
    require_muon: bool = True,
) -> dict[str, str]:
    """Write `use_muon` and `muon_view` on every trainable tensor and return `{name: "muon" | "adamw"}`.

    An existing `param.use_muon` that the user set wins over the rules; `include` and `exclude` win over both.
    Calling again decides afresh and never takes its own earlier tags for the user's.

    Args:
        model: the model to tag, in place (attributes of its parameters only).
        include: regexes of tensors that must be on Muon.
        exclude: regexes of tensors that must be on AdamW; wins over `include`.
        matrix_split: see `explain_parameters`.
        conv: see `explain_parameters`.
        require_muon: raise when nothing is on Muon.

    Raises:
        ValueError: no tensor is on Muon, or what `explain_parameters` raises.
    """
    rows = explain_parameters(model, include=include, exclude=exclude, matrix_split=matrix_split, conv=conv)
    if require_muon:
        check_coverage(rows)
    apply_tags(model, rows)
    return {row.name: row.algorithm for row in rows}


def apply_tags(model: nn.Module, rows: Iterable[ParameterRow]) -> None:
    """Write the decisions of `rows` on the parameters of `model`."""
    by_name = dict(model.named_parameters())
    for row in rows:
        parameter = by_name[row.name]
        users = user_choice(parameter)
        parameter.use_muon = row.is_muon  # type: ignore[attr-defined]
        parameter.muon_view = row.view  # type: ignore[attr-defined]
        parameter.muon_tag = _Tag(row.is_muon, users)  # type: ignore[attr-defined]


def user_choice(parameter: nn.Parameter) -> bool | None:
    """Return `parameter.use_muon` where the user set it, None where it is absent or our own tag."""
    value = getattr(parameter, "use_muon", None)
    if value is None:
        return None
    tag = getattr(parameter, "muon_tag", None)
    if tag is not None and tag.use_muon == bool(value):
        return tag.user
    return bool(value)


def summarize(rows: Iterable[ParameterRow]) -> Summary:
    """Add up tensors and elements on each side; `hidden_share` leaves embeddings and heads out."""
    rows = list(rows)
    muon = [row for row in rows if row.is_muon]
    adamw = [row for row in rows if not row.is_muon]
    muon_elements, adamw_elements = sum(r.count for r in muon), sum(r.count for r in adamw)
    hidden = muon_elements + sum(row.count for row in adamw if row.role not in _OUTSIDE)
    return Summary(
        muon_tensors=len(muon),
        muon_elements=muon_elements,
        adamw_tensors=len(adamw),
        adamw_elements=adamw_elements,
        share=muon_elements / max(1, muon_elements + adamw_elements),
        hidden_share=muon_elements / max(1, hidden),
    )


def check_coverage(rows: Sequence[ParameterRow]) -> Summary:
    """Raise when Muon covers nothing, warn when it covers little of the hidden part of the model.

    Raises:
        ValueError: no trainable tensor, or none on Muon.
    """
    summary = summarize(rows)
    if not rows:
        raise ValueError("The model must have trainable parameters; got none. Set requires_grad on some.")
    if not summary.muon_tensors:
        largest = max(rows, key=lambda row: row.count)
        raise ValueError(
            f"The model must have at least one tensor on Muon; got 0 of {len(rows)}. The largest is {largest.name} "
            f"{largest.shape} ({largest.rule}). Name matrices with `include`, or use an AdamW optimizer."
        )
    if summary.hidden_share < LOW_COVERAGE:
        left = sorted((r for r in rows if not r.is_muon and r.role not in _OUTSIDE), key=lambda r: -r.count)[:3]
        logger.warning(
            "Muon covers only %.1f %% of the trainable elements outside embeddings and heads (%.1f %% of all). "
            "The largest left to AdamW: %s. Use `include` if these are matrices.",
            100 * summary.hidden_share,
            100 * summary.share,
            "; ".join(f"{row.name} {row.shape} ({row.rule})" for row in left),
        )
    return summary


def _override(tensor: TensorSites, verdict: Verdict, include: Sequence[str], exclude: Sequence[str]) -> Verdict:
    names = [site.name for site in tensor.sites]
    for pattern in exclude:
        if any(re.search(pattern, name) for name in names):
            return Verdict(False, verdict.role, f"exclude {pattern!r}")
    wanted, rule = None, ""
    for pattern in include:
        if any(re.search(pattern, name) for name in names):
            wanted, rule = True, f"include {pattern!r}"
            break
    if wanted is None and (wanted := user_choice(tensor.parameter)) is not None:
        rule = f"param.use_muon = {wanted}, set by the user"
    if wanted is None:
        return verdict
    if not wanted:
        return Verdict(False, verdict.role, rule)
    view = verdict.view if verdict.use_muon else matrix_view(tensor.sites[0], true_shape(tensor.parameter))
    return Verdict(True, verdict.role, rule, view)


def _row(tensor: TensorSites, verdict: Verdict, matrix_split: str) -> ParameterRow:
    shape = true_shape(tensor.parameter)
    count = 1
    for size in shape:
        count *= size
    view = MatrixView()
    if verdict.use_muon:
        view = verdict.view if matrix_split == "none" else split_fused(tensor.sites[0], verdict.view, shape)
        view = split_heads(tensor.sites[0], view, shape) if matrix_split == "per_head" else view
    plain = verdict.role in ("norm", "bias") or len(shape) < 2 or bool(_NO_DECAY_NAME.search(tensor.name))
    return ParameterRow(
        name=tensor.name,
        shape=shape,
        count=count,
        algorithm="muon" if verdict.use_muon else "adamw",
        rule=verdict.rule,
        decay=verdict.use_muon or not plain,
        view=view,
        role=verdict.role,
    )


def _check_patterns(option: str, patterns: Sequence[str], tensors: Sequence[TensorSites], model: nn.Module) -> None:
    names = [site.name for tensor in tensors for site in tensor.sites]
    every = [name for name, _ in model.named_parameters(remove_duplicate=False)] if patterns else []
    for pattern in patterns:
        try:
            found = any(re.search(pattern, name) for name in names)
        except re.error as error:
            raise ValueError(f"{option} must hold regular expressions; got {pattern!r} ({error}).") from None
        if found:
            continue
        if any(re.search(pattern, name) for name in every):
            continue  # it matches frozen tensors only: nothing to do, and no typo
        close = nearest(pattern, names) if len(names) < 8 else _nearest_only(pattern, names)
        raise ValueError(f"{option} must match a trainable parameter; got {pattern!r}, which matches none.{close}")


def _nearest_only(pattern: str, names: Sequence[str]) -> str:
    hint = nearest(pattern, names)
    return hint if "Did you mean" in hint else " `hf-muon params` lists the names."
