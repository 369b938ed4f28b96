# SPDX-License-Identifier: Apache-2.0
"""`hf-muon launch`: `accelerate launch` whose processes know `optim="dmuon"` without importing hf_muon themselves."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import UsageError
from .resources import recipes_dir

SETTINGS = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
    "allow_interspersed_args": False,
}
_USAGE = """Usage: hf-muon launch [--config-file FILE] [accelerate options] script.py [script arguments]

accelerate launch with optim="dmuon" registered in every process.
FILE is an Accelerate configuration, or the name of a shipped one: {names}.
All other options are those of `accelerate launch --help`.
"""


def launch(
    words: Annotated[list[str] | None, typer.Argument(help="accelerate options, the script and its arguments")] = None,
) -> None:
    """Run a script through `accelerate launch` with optim="dmuon" registered."""
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(_USAGE.format(names=", ".join(sorted(shipped_files()))))
        if words:
            return
        raise UsageError("launch needs a script: hf-muon launch [accelerate options] script.py [arguments].")
    from accelerate.commands.launch import launch_command

    launch_command(launch_arguments(words))


def launch_arguments(words: list[str]) -> Any:
    """Return accelerate's parsed arguments, the script replaced by this module with the script as its argument.

    Args:
        words: what stands behind `hf-muon launch`.

    Raises:
        UsageError: the configuration file is not there, or the script is no Python.
    """
    from accelerate.commands.launch import launch_command_parser

    arguments = launch_command_parser().parse_args(words)
    if arguments.no_python:
        raise UsageError("--no_python must not be given: only Python scripts can use optim='dmuon'.")
    if arguments.config_file is not None:
        arguments.config_file = str(_configuration(arguments.config_file))
    script = ["-m", arguments.training_script] if arguments.module else [arguments.training_script]
    if not arguments.module and not Path(arguments.training_script).is_file():
        raise UsageError(f"the script must exist; got {arguments.training_script!r}.")
    arguments.module = True
    arguments.training_script = __name__ if __name__ != "__main__" else "hf_muon.cli.launch"
    arguments.training_script_args = [*script, *arguments.training_script_args]
    return arguments


def shipped_files() -> dict[str, Path]:
    """Return the Accelerate files that come with hf-muon, by name."""
    return {path.stem: path for path in (recipes_dir() / "accelerate").glob("*.yaml")}


def _configuration(given: str) -> Path:
    path = Path(given)
    if path.is_file():
        return path
    shipped = shipped_files()
    if given in shipped:
        return shipped[given]
    raise UsageError(f"--config-file must be a file or one of {', '.join(sorted(shipped))}; got {given!r}.")


def run_script(words: list[str]) -> None:
    """Run `script.py arguments` or `-m module arguments` as the main program, hf_muon imported first."""
    import hf_muon  # noqa: F401  (registers the optimizer)

    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(words)
    sys.path.insert(0, str(Path(words[0]).resolve().parent))  # as Python itself does for a script
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    run_script(sys.argv[1:])
