# SPDX-License-Identifier: Apache-2.0
"""`PartitionedOptimizer`: the one optimizer on DeepSpeed's flat partitions."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...optim import MuonWithAuxAdam
from ...optim.functional import MuonOptions
from ...optim.parameter_state import fits, new_state, saved_state
from ...optim.state_loading import LIVE_KEYS, plan_load
from ...optim.state_spec import StateSpec
from ...optim.update_size import UpdateSize
from ...param_groups.sites import true_shape
from .exchange import run_plan
from .groups import remember_views
from .idle_experts import leave_out_idle, runs_between
from .layout import Piece, StepPlan, make_plan, split_units, stage3_pieces, stage12_pieces

logger = logging.getLogger("hf_muon.deepspeed")
PLAIN = StateSpec()  # the variants are refused in `check_config`


class PartitionedOptimizer(MuonWithAuxAdam):
    """`MuonWithAuxAdam` as DeepSpeed's engine drives it: same groups, options and mathematics.

    ZeRO 1 to 3 exchange each group's parameters for this rank's flat float32 partition, reduce, unscale and clip the
    raw gradients (one norm over both halves), and call `step()`. Momentum and AdamW are elementwise, so they run on
    the partition and exist once in the job. Newton-Schulz needs whole matrices: the owner of each gets the pieces of
    its momentum update, orthogonalizes it once, and returns the pieces. With ZeRO 0 the parameters stay whole; owners
    share the work and send the results to all.

    The class name matters: the engine runs its own Muon on tagged parameters, after clipping was decided, whenever
    the name of the optimizer's class contains "muon".
    """

    skip_on_device: bool | None = False  # gradients are equal on all ranks here, or DeepSpeed skips the step itself
    _engine: Any = None
    _plans: dict[int, StepPlan] | None = None  # id of a flat partition -> what its ranks do; None where whole
    _whole_plans: dict[tuple[int, ...], StepPlan]
    _sizes_of: list[tuple[int, int]]
    _step_seen: int = -1

    def connect(self, engine: Any) -> None:
        """Read the partitions that `engine` has made of the groups. No communication.

        Args:
            engine: `deepspeed.DeepSpeedEngine` whose basic optimizer this is.
        """
        self._engine = weakref.ref(engine)
        self._whole_plans = {}
        zero = engine.optimizer
        if hasattr(zero, "round_robin_bit16_groups"):
            found = [
                (flat, stage12_pieces(zero, i), zero.real_dp_process_group[i], self.param_groups[i])
                for i, flat in enumerate(zero.single_partition_of_fp32_groups)
            ]
        elif hasattr(zero, "fp16_groups") and hasattr(zero, "sub_group_to_group_id"):
            found = [
                (
                    flat,
                    stage3_pieces(zero, i),
                    zero.sub_group_process_groups[i],
                    self.param_groups[zero.sub_group_to_group_id[i]],
                )
                for i, flat in enumerate(zero.fp32_partitioned_groups_flat)
            ]
        else:
            if any(group.get("moe", False) for group in self.param_groups):
                self.finite_reducer = _largest_over_ranks  # ranks hold other experts, so other gradients
            return
        self._plans = {}
        for flat, params, process_group, group in found:
            if group["use_muon"]:
                units = [u for p, pieces in params for u in split_units(0, true_shape(p), p.muon_view, pieces)]
                self._plans[id(flat)] = make_plan(units, process_group, group)

    # ------------------------------------------------------------------ groups and state

    def _start_state(self, group: dict[str, Any]) -> None:
        """Make none: DeepSpeed exchanges the parameters first, and whole state would not fit where ZeRO is needed."""
        if group["use_muon"]:
            remember_views(group)

    def remember_sizes(self) -> None:
        """Note the whole sizes of the groups for reports, before DeepSpeed exchanges the parameters."""
        self._sizes_of = [
            (len(g["params"]), sum(torch.Size(true_shape(p)).numel() for p in g["params"])) for g in self.param_groups
        ]

    def group_sizes(self) -> list[tuple[int, int]]:
        """Return (tensors, elements) of each group, whole tensors counted."""
        return self._sizes_of if "_sizes_of" in self.__dict__ else super().group_sizes()

    def _synchronize_state(self) -> None:
        if self._engine is None:
            return
        if self._plans is None:
            super()._synchronize_state()
            return
        for group in self.param_groups:
            for flat in group["params"]:
                if not fits(flat, self.state.get(flat) or {}, group["use_muon"], PLAIN):
                    self.state[flat] = new_state(flat, group["use_muon"], self._fused(flat), PLAIN)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what this optimizer saved under the same ZeRO stage and number of ranks, partition by partition.

        Raises:
            ValueError: groups or partitions of other sizes.
        """
        if self._plans is None:
            super().load_state_dict(state_dict)
            return
        hidden = ("param_names", "matrix_views")  # of matrices; the state is of partitions
        live = [{k: v for k, v in group.items() if k not in hidden} for group in self.param_groups]
        groups = [{k: v for k, v in group.items() if k not in hidden} for group in state_dict["param_groups"]]
        plan = plan_load(live, {**state_dict, "param_groups": groups})
        for group, merged in zip(self.param_groups, plan.groups, strict=True):
            group.update({k: v for k, v in merged.items() if k not in LIVE_KEYS})
        for flat, use_muon, saved in plan.states:
            if saved:
                self.state[flat] = saved_state(flat, saved, {}, use_muon, self._fused(flat), PLAIN)

    # ------------------------------------------------------------------ step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the partitions in the present groups; DeepSpeed calls it group by group. Collective.

        Args:
            closure: reevaluates the model and returns the loss; DeepSpeed gives none.
        """
        if self._engine is None:
            return None  # half precision under ZeRO 0: DeepSpeed steps once with zero gradients to have state made
        if self._plans is None:
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._synchronize_state()
        self._note_step()
        for index, group in enumerate(self.param_groups):
            if not group["use_muon"]:
                self._step_adam(index, group, None)
                continue
            for flat in group["params"]:
                self._step_partition(flat, group)
        return loss

    def _step_partition(self, flat: Tensor, group: dict[str, Any]) -> None:
        if flat.grad is None or self._plans is None:
            return
        options = MuonOptions.from_group(group)
        momentum = self.state[flat]["momentum_buffer"]
        grad = flat.grad.to(momentum.dtype)
        plan, idle = leave_out_idle(
            self._plans[id(flat)], lambda _, offset, numel: grad.narrow(0, offset, numel), self._device()
        )
        for run in runs_between(flat.numel(), idle.get(0, ())):
            weights, gradient, average = (tensor.narrow(0, *run) for tensor in (flat, grad, momentum))
            _average_and_decay_(weights, gradient, average, options)
            if options.nesterov:
                gradient.lerp_(average, options.momentum)  # DeepSpeed drops the partition's gradient after the step
        update = grad if options.nesterov else momentum
        self._sizes.expect_muon(flat)

        def write(_: int, offset: int, direction: Tensor) -> None:
            self._move(flat.narrow(0, offset, direction.numel()), direction, options.lr)

        run_plan(plan, lambda _, offset, numel: update.narrow(0, offset, numel), write, options, self._device())

    def _step_muon(self, index: int, group: dict[str, Any], mask: Tensor | None) -> None:
        """Update whole parameters (ZeRO 0): every rank keeps the momentum, one orthogonalizes each matrix."""
        options = MuonOptions.from_group(group)
        params = [param for param in group["params"] if param.grad is not None]
        momenta = [self.state[param]["momentum_buffer"] for param in params]
        grads = [param.grad.to(m.dtype) for param, m in zip(params, momenta, strict=True)]
        flat_grads = [grad.reshape(-1) for grad in grads]
        plan, idle = leave_out_idle(
            self._whole_plan(params, group), lambda i, *run: flat_grads[i].narrow(0, *run), self._device()
        )
        for index, (param, grad, momentum) in enumerate(zip(params, flat_grads, momenta, strict=True)):
            for run in runs_between(param.numel(), idle.get(index, ())):
                weights, gradient, average = (part.view(-1).narrow(0, *run) for part in (param, grad, momentum))
                _average_and_decay_(weights, gradient, average, options)
            self._sizes.expect_muon(param)

        def read(tensor: int, offset: int, numel: int) -> Tensor:
            momentum = momenta[tensor].view(-1).narrow(0, offset, numel)
            if not options.nesterov:
                return momentum
            return torch.lerp(flat_grads[tensor].narrow(0, offset, numel), momentum, options.momentum)

        def write(tensor: int, offset: int, direction: Tensor) -> None:
            self._move(params[tensor].view(-1).narrow(0, offset, direction.numel()), direction, options.lr)

        run_plan(plan, read, write, options, self._device())

    def _whole_plan(self, params: list[Tensor], group: dict[str, Any]) -> StepPlan:
        key = tuple(id(param) for param in params)
        if key not in self._whole_plans:
            # Experts differ from rank to rank, so nothing is shared there.
            engine = self._engine()
            alone = group.get("moe", False) or not torch.distributed.is_initialized()
            process_group = None if alone else engine.seq_data_parallel_group
            num_ranks = 1 if alone else torch.distributed.get_world_size(process_group)
            view_of = dict(zip(map(id, group["params"]), group["matrix_views"], strict=True))
            units = []
            for index, param in enumerate(params):
                pieces = [Piece(rank, 0, 0, param.numel()) for rank in range(num_ranks)]
                units += split_units(index, tuple(param.shape), view_of[id(param)], pieces)
            self._whole_plans[key] = make_plan(units, process_group, group, replicated=True, alone=alone)
        return self._whole_plans[key]

    def _move(self, weights: Tensor, direction: Tensor, lr: float) -> None:
        weights.add_(direction.to(weights.device), alpha=-lr)
        if self.track_update_rms:
            self._sizes.muon_squares.append(torch.linalg.vector_norm(direction).mul(lr).square())

    def _note_step(self) -> None:
        """Start the measurements anew with the first call of each step of the engine."""
        step = int(self._engine().global_steps)
        if step != self._step_seen:
            self._step_seen, self._sizes = step, UpdateSize()

    def _device(self) -> torch.device:
        return torch.device(self._engine().device)

    # ------------------------------------------------------------------ skipped steps

    @property
    def num_skipped_steps(self) -> int:
        """Return how many steps were skipped for inf or NaN: DeepSpeed's own count where it judges."""
        engine = self._judge()
        return super().num_skipped_steps if engine is None else int(engine.skipped_steps)

    @property
    def last_step_skipped(self) -> bool:
        """Return whether the last step was skipped for inf or NaN."""
        engine = self._judge()
        return super().last_step_skipped if engine is None else bool(getattr(engine.optimizer, "overflow", False))

    def _judge(self) -> Any:
        """Return the engine if a wrapper of it (ZeRO, or that of half precision) sees gradients first, else None."""
        engine = self._engine() if self._engine is not None else None
        return None if engine is None or engine.optimizer is self else engine

    def _say_if_repeated(self) -> None:
        """Say nothing: with ZeRO 0 too the ranks share the work."""


def _average_and_decay_(weights: Tensor, gradient: Tensor, momentum: Tensor, options: MuonOptions) -> None:
    momentum.lerp_(gradient, 1.0 - options.momentum)
    weights.mul_(1.0 - options.lr * options.weight_decay)


def _largest_over_ranks(flag: Tensor) -> Tensor:
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
    return flag
