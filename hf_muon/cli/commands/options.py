# SPDX-License-Identifier: Apache-2.0
"""Options that every command spells the same way."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout; notes go to stderr.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback when something fails.")]
