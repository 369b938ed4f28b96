# SPDX-License-Identifier: Apache-2.0
"""Numbers about a run before it starts: published configurations and models without weights."""
