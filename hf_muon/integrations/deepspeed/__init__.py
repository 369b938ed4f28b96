# SPDX-License-Identifier: Apache-2.0
"""hf-muon under DeepSpeed ZeRO 0 to 3: the same optimizer on DeepSpeed's partitions, through Trainer or by hand."""
