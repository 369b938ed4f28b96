# SPDX-License-Identifier: Apache-2.0
"""Glue to the libraries that train: transformers now, Accelerate and DeepSpeed later."""
