# SPDX-License-Identifier: Apache-2.0
"""Metrics of the recipes: held-out loss and exact match."""
