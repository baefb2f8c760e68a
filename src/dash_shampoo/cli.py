"""The command `dash-shampoo`."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import typer

NEEDED = ("typer", "rich", "matplotlib", "tensorboard", "numpy", "tomllib" if sys.version_info >= (3, 11) else "tomli")


def main() -> None:
    """Runs the command; exits with 2 after one line for mistakes of the user, with 130 after an interruption.

    Of several processes, as torchrun starts them, the first prints the line.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        _end(_complain(f"the command needs {', '.join(missing)}: pip install 'dash-shampoo[train]'"))
    import typer

    from dash_shampoo.train.errors import InputError

    # Some versions of typer bring their own copy of click: this is the base of the usage errors in all of them.
    usage_error: Any = typer.BadParameter.__base__
    try:
        code = typer.main.get_command(build())(standalone_mode=False)
    except InputError as error:
        code = _complain(str(error))
    except usage_error as error:
        code = _complain(error.format_message())
    except (typer.Abort, KeyboardInterrupt):
        code = 130
    _end(code or 0)


def build() -> typer.Typer:
    """The typer application with its sub-commands."""
    import typer

    import dash_shampoo
    from dash_shampoo.bench.command import app as bench
    from dash_shampoo.claim.command import app as claim
    from dash_shampoo.compare.command import command as compare
    from dash_shampoo.plan.command import command as plan
    from dash_shampoo.train.command import command as train

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

    def version(wanted: bool) -> None:
        if wanted:
            typer.echo(f"dash-shampoo {dash_shampoo.__version__}")
            raise typer.Exit

    @app.callback(invoke_without_command=False)
    def root(
        show: bool = typer.Option(False, "--version", callback=version, is_eager=True, help="Show the version."),
    ) -> None:
        """Shampoo for PyTorch, cheap enough to use."""

    app.command("train")(train)
    app.add_typer(bench, name="bench")
    app.command("plan")(plan)
    app.command("compare")(compare)
    app.add_typer(claim, name="claim")
    return app


def _end(code: int) -> NoReturn:
    """Exits; one of several processes at once, since threads of a process group may abort Python's tidying up."""
    if _several():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _several() -> bool:
    return os.environ.get("WORLD_SIZE", "1") != "1"


def _complain(message: str) -> int:
    rank = os.environ.get("RANK", "0")
    if rank == "0":
        _print(message)
    if _several():
        from dash_shampoo.train.processes import meet

        if not meet() and rank != "0":  # the mistake is this process's alone: nobody else says it
            _print(message)
    return 2


def _print(message: str) -> None:
    print("dash-shampoo: " + " ".join(message.split()), file=sys.stderr, flush=True)
