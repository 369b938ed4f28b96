# SPDX-License-Identifier: Apache-2.0
"""What a model consists of, as the plan sees it: routed parameters, units, and the owners that the runtime picks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ..distributed.ownership import Matrix, OwnershipPlan, build_plan
from ..distributed.rates import DeviceRates, work_on
from ..param_groups import MatrixView, ParameterRow, explain_parameters
from .units import unit_names, unit_of


@dataclass(frozen=True)
class Parameter:
    """One trainable tensor: its routing row, and the unit that gathers it ("" is the root)."""

    row: ParameterRow
    unit: str


@dataclass(frozen=True)
class Census:
    """The trainable tensors of a model in `named_parameters()` order, and its units in the order of their modules."""

    parameters: tuple[Parameter, ...]
    units: tuple[str, ...]

    @property
    def muon_elements(self) -> int:
        """Elements that Muon updates: P_M."""
        return sum(p.row.count for p in self.parameters if p.row.is_muon)

    @property
    def adamw_elements(self) -> int:
        """Elements that AdamW updates."""
        return sum(p.row.count for p in self.parameters if not p.row.is_muon)

    @property
    def elements(self) -> int:
        """All trainable elements."""
        return self.muon_elements + self.adamw_elements

    def unit_elements(self, *, muon: bool) -> list[int]:
        """Return the elements of one half in each unit, in order; the root's come first."""
        totals = dict.fromkeys(("", *self.units), 0)
        for parameter in self.parameters:
            if parameter.row.is_muon == muon:
                totals[parameter.unit] += parameter.row.count
        return list(totals.values())

    def matrices(self, rates: DeviceRates | None = None) -> list[Matrix]:
        """Return what the runtime gives owners to, in its order; stacks of experts are one entry each.

        Args:
            rates: measured seconds as the cost; None: FLOPs of a GPU.
        """
        work = work_on("cuda", rates)
        return [
            Matrix.of_parameter(
                parameter.row.name, parameter.row.shape, parameter.unit, view=parameter.row.view, work=work
            )
            for parameter in self.parameters
            if parameter.row.is_muon
        ]

    def owners(self, *, shard: int, replicate: int = 1, rates: DeviceRates | None = None) -> OwnershipPlan:
        """Return the ownership plan that `dedicate_params` would make on this grid, with these rates."""
        return build_plan(self.matrices(rates), replicate=replicate, shard=shard, split_stacks=True)


def take_census(
    model: nn.Module, *, include: tuple[str, ...] = (), exclude: tuple[str, ...] = (), matrix_split: str = "auto"
) -> Census:
    """List the trainable tensors of `model` with their algorithm and unit. Reads no values.

    Raises:
        ValueError: what `explain_parameters` raises.
    """
    rows = explain_parameters(model, include=include, exclude=exclude, matrix_split=matrix_split)
    sites: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        sites.setdefault(id(parameter), []).append(name)
    by_name = {name: id(parameter) for name, parameter in model.named_parameters()}
    units = unit_names(model)
    parameters = tuple(Parameter(row, unit_of(sites[by_name[row.name]], units)) for row in rows)
    return Census(parameters, tuple(units))


__all__ = ["Census", "MatrixView", "Parameter", "take_census"]
