# SPDX-License-Identifier: Apache-2.0
"""Metrics of the recipes, and the published evaluations: GSM8K, MMLU, MBPP, MBPP+."""
