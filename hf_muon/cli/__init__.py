# SPDX-License-Identifier: Apache-2.0
"""The `hf-muon` command: thin commands over the package, the recipes' driver and its report."""
