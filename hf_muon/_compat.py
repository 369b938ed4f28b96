# SPDX-License-Identifier: Apache-2.0
"""Version gates and every private upstream name that hf-muon touches, each with its reason.

Nothing else in the package may import a private name of torch, transformers or accelerate. Each entry says why
no public hook serves, and has a canary test in `tests/architecture` that fails when upstream changes.
"""
