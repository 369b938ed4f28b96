# SPDX-License-Identifier: Apache-2.0
"""hf-muon in transformers' Trainer: registration, optimizer factory, log callback."""
