# SPDX-License-Identifier: Apache-2.0
"""`hf-muon`: registers the commands and turns every failure into one line and an exit code.

Commands import torch and transformers inside their functions, so that help and usage errors come at once.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from typing import Annotated

import typer

from .console import notes, quiet_third_parties, route_own_log
from .errors import one_line

app = typer.Typer(
    name="hf-muon",
    help="Train Hugging Face models with the Muon optimizer. Start with: hf-muon run",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        sys.stdout.write(f"hf-muon {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train Hugging Face models with the Muon optimizer. Start with: hf-muon run."""


def _register_commands() -> None:
    from . import launch
    from .commands import calibrate, env, params, plan, recipes, run
    from .commands import eval as evaluation

    app.command("run")(run.run)
    app.command("recipes")(recipes.recipes)
    app.command("params")(params.params)
    app.command("eval")(evaluation.evaluate)
    app.command("plan")(plan.plan)
    app.command("calibrate")(calibrate.calibrate)
    app.command("env")(env.env)
    app.command("launch", context_settings=launch.SETTINGS)(launch.launch)


_register_commands()


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and leave with 0 (done), 1 (failed) or 2 (bad usage).

    Args:
        arguments: the words after `hf-muon`; those of the process when left out.
    """
    words = sys.argv[1:] if arguments is None else arguments
    # OpenMP reads this when torch is loaded. Threads that spin while they wait make a run on busy cores 20x slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    quiet_third_parties()
    route_own_log()
    code = _run(words)
    if arguments is None:
        gc.freeze()  # the process ends here: collecting everything once more would cost a second
    sys.exit(code)


def _run(words: list[str]) -> int:
    try:
        code = app(args=words, standalone_mode=False, prog_name="hf-muon")
        return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        return _fail("stopped by the user.", 1)
    except BrokenPipeError:
        sys.stdout = None  # the reader went away; nothing is left to say
        return 0
    except Exception as error:
        if type(error).__name__ == "Abort":
            return _fail("stopped by the user.", 1)
        if "--debug" in words:
            traceback.print_exc()
        code = getattr(error, "exit_code", 1)
        if type(error).__name__ == "NoArgsIsHelpError":
            sys.stdout.write(f"{error}\n")
            return 2
        hint = "" if "--debug" in words or code == 2 else " Run again with --debug for the traceback."
        return _fail(one_line(error) + hint, code)


def _fail(message: str, code: int) -> int:
    notes.print(f"hf-muon: {message}", markup=False)
    return code
