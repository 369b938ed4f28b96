# SPDX-License-Identifier: Apache-2.0
"""One torch optimizer for both halves, and the Muon update as a function on matrices."""

from .functional import MuonEntry, MuonOptions, adjust_scale, muon_update_
from .muon import MuonWithAuxAdam

__all__ = ["MuonEntry", "MuonOptions", "MuonWithAuxAdam", "adjust_scale", "muon_update_"]
