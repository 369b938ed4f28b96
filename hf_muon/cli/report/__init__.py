# SPDX-License-Identifier: Apache-2.0
"""The report of a run: one HTML file that opens offline, and the picture of the loss curves."""

from .page import write_report

__all__ = ["write_report"]
