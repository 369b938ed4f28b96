# SPDX-License-Identifier: Apache-2.0
"""DMuon: whole matrices on dedicated owners, under FSDP2 and DDP. Knows buffers, ranks and hooks, nothing of Muon."""

from .data_parallel import ReplicaOwners, dedicate_replicas, find_replica_owners
from .dedicate import DetachedMatrix, Placement, attach, dedicate_params, detach, put_back
from .owned import OwnedDTensor, is_owned
from .owned_gradient import OwnedGradient
from .ownership import Matrix, OwnershipPlan, build_plan
from .runtime import (
    DMuonRuntime,
    comm_stats,
    find_runtime,
    ownership,
    reshard_models_of,
    reshard_units,
    runtime_of,
)
from .standard import from_standard, owned_like, to_standard

__all__ = [
    "DMuonRuntime",
    "DetachedMatrix",
    "Matrix",
    "OwnedDTensor",
    "OwnedGradient",
    "OwnershipPlan",
    "Placement",
    "ReplicaOwners",
    "attach",
    "build_plan",
    "comm_stats",
    "dedicate_params",
    "dedicate_replicas",
    "detach",
    "find_replica_owners",
    "find_runtime",
    "from_standard",
    "is_owned",
    "owned_like",
    "ownership",
    "put_back",
    "reshard_models_of",
    "reshard_units",
    "runtime_of",
    "to_standard",
]
