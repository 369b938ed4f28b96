# SPDX-License-Identifier: Apache-2.0
"""`DMuonPlugin`: Accelerate's FSDP2 plugin with dedicated owners, for loops without Trainer."""

from __future__ import annotations

from dataclasses import dataclass, field

from accelerate import FullyShardedDataParallelPlugin

from ...config import nearest
from .activation import activate
from .settings import MODES, refuse_fsdp1


@dataclass
class DMuonPlugin(FullyShardedDataParallelPlugin):
    """FSDP2 in which every Muon matrix lives whole on one owner rank.

    Give it to `Accelerator(fsdp_plugin=...)` and prepare model and `hf_muon.MuonWithAuxAdam` together. Takes every
    argument of `accelerate.FullyShardedDataParallelPlugin`; `fsdp_version` is 2.

    Args:
        dmuon: `auto` takes the mode from `reshard_after_forward` (z3 if true, z2 if false); `z2` and `z3` set it apart
            from that of the remaining parameters; `off` shards the matrices like all others.
        rates: file that `hf-muon calibrate` wrote: owners are balanced by its seconds instead of by FLOPs.

    Raises:
        ValueError: another value of `dmuon`.
        NotImplementedError: `fsdp_version=1`.
    """

    fsdp_version: int = field(default=2, metadata={"help": "The FSDP version to use. Only 2 has owners."})
    dmuon: str = field(default="auto", metadata={"help": "Dedicated owners under FSDP2: auto, z2, z3 or off."})
    rates: str | None = field(default=None, metadata={"help": "File of hf-muon calibrate, to balance owners by."})

    def __post_init__(self) -> None:
        """Check, and make Accelerate's FSDP2 preparation dedicate owners."""
        if self.dmuon not in MODES:
            raise ValueError(
                f"dmuon must be one of {', '.join(MODES)}; got {self.dmuon!r}.{nearest(self.dmuon, MODES)}"
            )
        refuse_fsdp1(self)
        super().__post_init__()
        activate()
