# SPDX-License-Identifier: Apache-2.0
"""The two ways a command can fail, and how each reads on stderr."""

from __future__ import annotations


class UsageError(Exception):
    """The user asked for something that cannot be done: exit code 2, nothing written.

    The message is one sentence or two: what is wrong, and the way out.
    """

    exit_code = 2


class RunError(Exception):
    """Something failed while working: exit code 1."""

    exit_code = 1


def one_line(error: BaseException) -> str:
    """Return the message of any exception as a single line, click's own included."""
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    return " ".join(text.split()) or type(error).__name__
