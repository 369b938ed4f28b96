# SPDX-License-Identifier: Apache-2.0
"""The recipes' driver: tasks, one training run, the grid over learning rates and seeds, the comparison."""
