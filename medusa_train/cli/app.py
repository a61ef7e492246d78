"""What the three commands share: exit codes, one-line errors, ``--version``.

Nothing here or at the top of the command modules may import torch or transformers, so that
``--help`` answers at once; each command imports what it needs in its body.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import logging
import os
import sys
import time
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Annotated, Any

import typer
import typer.core

from medusa_train.errors import INTERRUPTED, InputError, MedusaTrainError

WAIT_FOR_MAIN_SECONDS = 15.0

# Typer's own copy of click is private; the base of the one usage error that it exports is all of
# them: unknown options and commands, missing and bad values.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]

Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set any key of the recipe, such as heads.num_heads=3. May be given many times.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


class ErrorGroup(typer.core.TyperGroup):
    """A command group that ends with the exit codes of :mod:`medusa_train.errors`."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command and exit: 0 done, 1 failed, 2 bad input, 130 interrupted."""
        keep_output_clean()
        try:
            _check_launcher()
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except MedusaTrainError as error:
            print_errors(error)
            code = error.exit_code
        except _UsageError as error:
            code = _print_usage_error(error)
        except typer.Abort:
            code = 1
        if code == INTERRUPTED and _rank() == 0:
            typer.echo("interrupted", err=True)
        if standalone_mode:
            sys.exit(code or 0)
        return code


def keep_output_clean() -> None:
    """Let DeepSpeed's log go to stderr, since stdout carries results only, and quieten others.

    Where it is installed, other libraries import it at moments of their own, and what it logs from
    then on goes to what stdout was at that moment.
    """
    # It warns, wherever another library imports it, of a kernel that few installations have.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    if "deepspeed" not in sys.modules and not any(isinstance(f, _ToStderr) for f in sys.meta_path):
        sys.meta_path.insert(0, _ToStderr())


class _ToStderr(importlib.abc.MetaPathFinder):
    """Finds ``deepspeed`` as always, and lets it take stderr for stdout while it is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec, with a loader that redirects."""
        del path, target
        if fullname != "deepspeed":
            return None
        # Libraries also only ask whether it is there, so it is found this way every time.
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_to_stderr(module: ModuleType) -> None:
                _choose_accelerator()
                with contextlib.redirect_stdout(sys.stderr):
                    load(module)

            spec.loader.exec_module = load_to_stderr  # type: ignore[method-assign]
        return spec


def _choose_accelerator() -> None:
    """Tell DeepSpeed that the CPU is meant where nothing else is there; else it warns of it."""
    import torch

    if not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def make_app(help_text: str, *, name: str) -> typer.Typer:
    """A group of commands called ``name`` with ``--version`` and our errors."""
    app = typer.Typer(
        name=name,
        help=help_text,
        cls=ErrorGroup,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )

    def options(
        version: Annotated[
            bool,
            typer.Option("--version", help="Print the version.", callback=_version, is_eager=True),
        ] = False,
    ) -> None:
        pass

    app.callback()(options)
    return app


def print_errors(error: MedusaTrainError) -> None:
    """Print each of the error's lines on stderr.

    Where several processes run, the main one most likely has the same to say, and then the launcher
    ends the others while they wait here; what only one of them has met is said with its number.
    """
    rank = _rank()
    if rank and error.lines:
        time.sleep(WAIT_FOR_MAIN_SECONDS)
    for line in error.lines:
        typer.echo(f"error: process {rank}: {line}" if rank else f"error: {line}", err=True)


def _check_launcher() -> None:
    """Refuse what no launcher sets; it is read in many places, and by libraries."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        text = os.environ.get(name, "0")
        if not text.isdecimal():
            raise InputError(
                f"{name}: the environment says {text!r}, and launchers such as torchrun set whole "
                "numbers; unset it"
            )


def _rank() -> int:
    from medusa_train.console import process_index

    return process_index()


def _version(wanted: bool) -> None:
    if wanted:
        from medusa_train import __version__

        typer.echo(f"medusa-train {__version__}")
        raise typer.Exit


def _print_usage_error(error: Any) -> int:
    command = error.ctx.command_path if error.ctx else "medusa-train"
    # Newer releases of typer put pydantic's prefix before a value that is no choice.
    message = error.format_message().replace("Value error, ", "").rstrip(".")
    typer.echo(f"error: {command}: {message}; see `{command} --help`", err=True)
    return int(error.exit_code)
