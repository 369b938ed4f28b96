# SPDX-License-Identifier: Apache-2.0
"""The optimizer's part of owners under DDP: whose momentum is where, and how a checkpoint gets all of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..config import MuonConfig
from .finite_guard import agree_over_meshes
from .momentum_storage import settle_copies
from .notices import inform_once, logger
from .parameter_state import resting_state
from .quantized import plain_momentum
from .state_spec import ROW_STATISTICS, spec_of
from .tensor_layout import is_dtensor, is_owned

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from ..distributed import ReplicaOwners
    from ..distributed.exchange import Exchange

NEEDS_FSDP2 = "dmuon={} needs FSDP2; got DDP. Use an Accelerate file with FSDP2, or leave dmuon at auto."


class SharedWork:
    """Mixed into `MuonWithAuxAdam`: one owner rank per matrix of a DDP model does its work and holds its momentum."""

    state: Any
    _config: MuonConfig
    _replicas: tuple[ReplicaOwners, ...] = ()
    _gathered: dict[int, dict[str, Tensor]] | None = None  # state by id of the parameter, until the next step
    _allows_partial_state: bool = False
    _answers: weakref.WeakKeyDictionary[nn.Module, bool] | None = None  # of dedicate_matrices, by DDP module

    def dedicate_matrices(self, ddp: DistributedDataParallel) -> bool:
        """Give each Muon matrix of a DDP model an owner rank. Collective over its process group.

        `OptimizerFactory()(ddp)` and `Accelerator.prepare(model, optimizer)` do it by themselves. From the first
        forward on, momentum lives on the owner alone.

        Args:
            ddp: the model, before its first backward; another communication hook cannot be registered after.

        Returns:
            Whether there are owners now. If not, a log line says why: every rank then does all the work.

        Raises:
            ValueError: `ddp` reduces no Muon matrix of this optimizer.
            NotImplementedError: `dmuon=z2` or `z3`, which need FSDP2.
            RuntimeError: the ranks disagree (raised on all of them).
        """
        from ..distributed import dedicate_replicas

        if self._config.dmuon in ("z2", "z3"):
            raise NotImplementedError(NEEDS_FSDP2.format(self._config.dmuon))
        matrices = self._matrices_in(ddp)
        if not matrices:
            raise ValueError(
                "ddp must reduce at least one Muon matrix of this optimizer; got none. Build the optimizer from the"
                " parameters of this model, and leave its matrices out of DDP's ignore list."
            )
        self._check_group(ddp)
        if self._answers is None:
            self._answers = weakref.WeakKeyDictionary()
        if ddp in self._answers:  # asked again, which Accelerate does at every further prepare
            return self._answers[ddp]
        self._take_home(matrices)
        reason = "dmuon=off" if self._config.dmuon == "off" else None
        found = dedicate_replicas(ddp, matrices, reason, rates=self._config.rates, ns_dtype=self._config.ns_dtype)
        self._answers[ddp] = not isinstance(found, str)
        if isinstance(found, str):
            logger.info("No owners under DDP: %s. Every rank orthogonalizes every matrix.", found)
            return False
        self._replicas = (*self._replicas, found)
        reference = weakref.ref(self)

        def start() -> None:
            optimizer = reference()
            if optimizer is not None:
                optimizer._synchronize_state()

        found.on_start.append(start)
        logger.info("DMuon under DDP: %d matrices have owners.", len(matrices))
        return True

    def _check_group(self, ddp: DistributedDataParallel) -> None:
        """Refuse ranks that would see other gradients than their peers: they could not agree to skip a step.

        Raises:
            NotImplementedError: a model over other ranks than those of an earlier one.
        """
        ranks = torch.distributed.get_process_group_ranks(ddp.process_group)
        for owners in self._replicas:
            if (others := owners.comm.grid.mesh.mesh.flatten().tolist()) != ranks:
                raise NotImplementedError(
                    f"All DDP models of one optimizer must use the same ranks; got {ranks} and {others}. Make one"
                    " optimizer per process group."
                )

    def has_matrices_in(self, ddp: DistributedDataParallel) -> bool:
        """Return whether `ddp` reduces any Muon matrix of this optimizer; the same on all ranks."""
        return bool(self._matrices_in(ddp))

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Gather all momentum, so that `state_dict()` can be called on one rank alone. Collective.

        Call it on all ranks right before a checkpoint. What was gathered waits on the CPU until the next step. Without
        owners nothing happens.

        Args:
            to: rank (in the whole job) that gets it; None: every rank.

        Note:
            Broadcasts the momentum once: 4 bytes per element of all Muon matrices.
        """
        if self._replicas:
            self.gather_momentum(to is None or to == torch.distributed.get_rank())

    def gather_momentum(self, keep: bool, allow_partial: bool = False) -> None:
        """Gather all momentum on those ranks that pass `keep`. Collective.

        Args:
            keep: whether this rank needs it.
            allow_partial: let `state_dict()` on a rank that does not keep it return what this rank has, for callers
                that build it everywhere and write it on one rank only.
        """
        gathered: dict[int, dict[str, Tensor]] = {}

        def put(param: Tensor, key: str, value: Tensor) -> None:
            if keep:
                gathered.setdefault(id(param), {})[key] = value.to("cpu", copy=True)

        for owners in self._replicas:
            if owners.is_active:
                self._send_state(owners, put)
        self._gathered = gathered if keep else None
        self._allows_partial_state = allow_partial and not keep

    def forbid_partial_state(self) -> None:
        """Let `state_dict()` raise again where momentum is elsewhere: the end of what `allow_partial` began."""
        self._allows_partial_state = False

    # ------------------------------------------------------------------ for the optimizer

    def _is_elsewhere(self, param: Tensor) -> bool:
        """Return whether another replica updates `param` and holds its momentum."""
        return any(owners.is_active and owners.is_elsewhere(param) for owners in self._replicas)

    def _gradient_to_apply(self, param: Tensor) -> Tensor | None:
        """Return the gradient that this rank updates the matrix `param` with; None where it leaves it alone."""
        # An owned matrix that no rank used has a zero gradient (all ranks take one path) but must not decay.
        if param.grad is None or not getattr(param, "has_gradient", True):
            return None
        content = getattr(param.grad, "content", None)  # of an OwnedGradient
        return param.grad if content is None else content.local

    def _check_reduced(self, label: str, param: Tensor) -> None:
        """Refuse a gradient of this rank alone, before anything changes.

        Raises:
            RuntimeError: by name; the other ranks have the same reason to raise it.
        """
        if not self._replicas:
            return
        from ..distributed import OwnedGradient

        grad = param.grad
        if isinstance(grad, OwnedGradient):
            grad.content.norms  # noqa: B018 (raises when something was added under no_sync)
        elif any(owners.owner_rank(param) is not None for owners in self._replicas):
            raise RuntimeError(
                f"{label}.grad must be reduced over ranks before step(); got one that DDP did not reduce. Run the"
                " forward through the DistributedDataParallel module, the last one of a step outside no_sync()."
            )

    def _largest_over_ranks(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum over the ranks that train these parameters. Collective; may work in place.

        Those are the ranks of their meshes, else of the DDP model that has them, else all of the job.
        """
        params = [param for _, param, _ in self._labelled_params()]
        if any(is_dtensor(param) for param in params):
            return agree_over_meshes(values, params)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            group = next((ddp.process_group for ddp in self._answers or ()), None)
            torch.distributed.all_reduce(values, op=torch.distributed.ReduceOp.MAX, group=group)
        return values

    def _total_over_ranks(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks of a mesh or of a DDP model, else `values`. Collective; may work in place."""
        params = [param for _, param, _ in self._labelled_params()]
        if any(is_dtensor(param) for param in params):
            return agree_over_meshes(values, params, torch.distributed.ReduceOp.SUM)
        for ddp in list(self._answers or ())[:1]:
            values = values.to(next(ddp.parameters()).device)
            torch.distributed.all_reduce(values, group=ddp.process_group)
        return values

    def _send_weights(self) -> list[Exchange]:
        """Start to send updated matrices to all ranks. Collective. Forget what was gathered for a checkpoint."""
        return [owners.send_weights() for owners in self._replicas if owners.is_active]

    def _forget_gathered(self) -> None:
        self._gathered, self._allows_partial_state = None, False

    def _with_gathered(self, state: dict[Any, Any]) -> dict[Any, Any]:
        """Return `state` of a state dict with the momentum of all ranks in it.

        Raises:
            RuntimeError: it is on other ranks and was not gathered.
        """
        if not any(owners.is_active for owners in self._replicas):
            return state
        gathered, result = self._gathered or {}, dict(state)
        for number, (label, param, _) in enumerate(self._labelled_params()):
            if not self._is_elsewhere(param):
                continue
            if id(param) in gathered:
                result[number] = {**state[number], **gathered[id(param)]}
            elif not self._allows_partial_state:
                rank = next(r for owners in self._replicas if (r := owners.owner_rank(param)) is not None)
                raise RuntimeError(
                    f"{label}: momentum_buffer must be gathered before state_dict(); it is on rank {rank}. Call"
                    " optimizer.consolidate_state_dict(to=0) on all ranks first, then state_dict() on rank 0."
                )
        return result

    def _say_if_repeated(self) -> None:
        """Say once, at the first step, that every rank does the same work and how to change that."""
        self._say_if_rates_are_unused()
        if self._replicas or self._config.dmuon == "off" or not torch.distributed.is_available():
            return
        muon = [param for _, param, group in self._labelled_params() if group["use_muon"]]
        is_plain = bool(muon) and all(type(param) in (Tensor, nn.Parameter) for param in muon)
        if is_plain and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            inform_once(
                "Every rank orthogonalizes every matrix: right, but repeated work. Under DistributedDataParallel build"
                " the optimizer as hf_muon.OptimizerFactory()(ddp_model), or call"
                " optimizer.dedicate_matrices(ddp_model)."
            )

    # ------------------------------------------------------------------ inner workings

    def _check_rates(self) -> None:
        """Read the file of rates where no other rank could be waiting: a wrong path then fails in a trial run too.

        Raises:
            ValueError: it is none that `hf-muon calibrate` wrote.
        """
        is_job = torch.distributed.is_available() and torch.distributed.is_initialized()
        if self._config.rates is not None and not (is_job and torch.distributed.get_world_size() > 1):
            from ..distributed.rates import read_rates

            read_rates(self._config.rates)

    def _say_if_rates_are_unused(self) -> None:
        has_owners = self._replicas or any(is_owned(param) for _, param, _ in self._labelled_params())
        if self._config.rates is not None and not has_owners:
            inform_once(f"rates={self._config.rates} is not used: no matrix has an owner here.")

    def _matrices_in(self, ddp: DistributedDataParallel) -> dict[str, nn.Parameter]:
        mine = {id(param) for _, param, group in self._labelled_params() if group["use_muon"]}
        return {
            name: parameter
            for name, parameter in ddp.module.named_parameters()
            if id(parameter) in mine and parameter.requires_grad and name not in ddp.parameters_to_ignore
        }

    def _take_home(self, matrices: dict[str, nn.Parameter]) -> None:
        """Leave the owners of an earlier wrapping of the same matrices: every rank gets whole momentum again."""
        wanted = {id(parameter) for parameter in matrices.values()}
        for owners in self._replicas:
            if not wanted.isdisjoint(map(id, owners.parameters)):
                if owners.is_active:
                    self._send_state(owners, self._keep_state)
                owners.retire()
        self._replicas = tuple(owners for owners in self._replicas if owners.parameters)

    def _keep_state(self, param: Tensor, key: str, value: Tensor) -> None:
        if key == ROW_STATISTICS:
            self.state[param][key] = value.to(param.device, copy=True)
            return
        spec = spec_of(self._config)
        self.state[param].update(resting_state(value.to(spec.momentum_device(param), copy=True), param, spec))

    def _send_state(self, owners: ReplicaOwners, put: Callable[[Tensor, str, Tensor], object]) -> None:
        """Send momenta, and row statistics where there are any, from owners to all ranks. Collective."""
        params, spec = owners.parameters, spec_of(self._config)
        settle_copies()
        owners.send_state(
            [spec.plain_dtype(param) for param in params],
            get=lambda index: plain_momentum(self.state[params[index]]).to(params[index].device),
            put=lambda index, value: put(params[index], "momentum_buffer", value),
        )
        if spec.row_statistics:
            rows = [self.state[param][ROW_STATISTICS] for param in params]
            owners.send_state(
                [row.dtype for row in rows],
                get=rows.__getitem__,
                put=lambda index, value: put(params[index], ROW_STATISTICS, value),
                shapes=[row.shape for row in rows],
            )

    def _labelled_params(self) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
        raise NotImplementedError  # MuonWithAuxAdam has it

    def _synchronize_state(self) -> None:
        raise NotImplementedError  # MuonWithAuxAdam has it
