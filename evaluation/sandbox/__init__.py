# SPDX-License-Identifier: Apache-2.0
"""Run one generated program where it can do no harm.

`launcher` is the trusted side. Everything else here runs inside the child, which has the standard library only: these
modules import nothing of the package.
"""
