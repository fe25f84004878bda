"""The `longread` program: its commands, its exit codes, and the one place where errors end.

Imports typer and nothing else at the top, so that `--help` is quick; commands import what they
need when they run.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from longread import __version__
from longread.commands import (
    butler,
    cache,
    config,
    evaluate,
    measure,
    measure_decode,
    measure_kernels,
    measure_load,
    measure_questions,
    measure_weights,
    models,
    options,
    sessions,
)
from longread.commands.ask import ask
from longread.commands.chat import chat, ingest
from longread.commands.doctor import doctor
from longread.commands.inspect import inspect

if TYPE_CHECKING:
    from longread.commands.run import Services

# Without rich's markup the help is plain text that needs no rich import.
app = typer.Typer(
    help="Read a long document once; ask it questions for ever after.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (ask, chat, ingest, inspect):
    app.command()(command)
for group, name in ((cache.app, "cache"), (models.app, "models"), (sessions.app, "sessions")):
    app.add_typer(group, name=name)
app.add_typer(butler.app, name="butler")
app.add_typer(config.app, name="config")
app.command()(doctor)
app.command("eval")(evaluate.evaluate)
measure.bench.command("decode")(measure_decode.bench_decode)
measure.bench.command("weights")(measure_weights.bench_weights)
measure.bench.command("kernels")(measure_kernels.bench_kernels)
measure.bench.command("questions")(measure_questions.bench_questions)
measure.bench.command("load")(measure_load.bench_load)
app.add_typer(measure.bench, name="bench")

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def _show_version(value: bool) -> None:
    if value:
        sys.stdout.write(f"longread {__version__}\n")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _top(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and leave."
        ),
    ] = False,
    verbose: options.Verbose = False,
) -> None:
    if ctx.invoked_subcommand is None:
        sys.stdout.write(ctx.get_help() + "\n")


def main(argv: Sequence[str] | None = None, services: Services | None = None) -> int:
    """Run one command line and return its exit code; never raises for what a user can do.

    argv: without the program's name; None for the process's own. services: what the commands
    build on, the real ones unless given.
    """
    _prepare_streams()
    logger = logging.getLogger("longread")
    logger.setLevel(logging.NOTSET)
    logger.handlers.clear()
    try:
        exit_code = _run(argv, services)
        sys.stdout.flush()
        _leave(argv)
        return exit_code
    except BaseException as error:
        _leave(argv)
        return _ending(error)


def _leave(argv: Sequence[str] | None) -> None:
    """Ignore Ctrl-C from here on: a second one would end in a traceback of Python's own exit."""
    if argv is None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _run(argv: Sequence[str] | None, services: Services | None) -> int:
    command = typer.main.get_command(app)
    arguments = list(sys.argv[1:] if argv is None else argv)
    result = command.main(
        arguments,
        prog_name="longread",
        standalone_mode=False,
        obj=services,
    )
    return result if isinstance(result, int) else 0


def _ending(error: BaseException) -> int:
    from longread.errors import LongreadError, ModelError

    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, BrokenPipeError):
        _silence(sys.stdout)
        return 1
    if isinstance(error, typer.TyperException):
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "longread"
        _say(f"{error.format_message().rstrip('.')} (see `{path} --help`)")
        return error.exit_code
    if isinstance(error, typer.Abort):
        _say("aborted")
        return 1
    verbose = logging.getLogger("longread").isEnabledFor(logging.DEBUG)
    if verbose:
        import traceback

        traceback.print_exception(error)
    if isinstance(error, LongreadError):
        _say(str(error))
        return error.exit_code
    if _is_out_of_memory(error):
        _say(
            "the memory of the device is full: read fewer pages (--pages), take a smaller model, "
            "or --device cpu"
        )
        return ModelError.exit_code
    if isinstance(error, OSError):
        _silence(sys.stdout)
        # Files are opened by name; what fails without one and is full is the output.
        if error.filename is None and error.errno in _FULL:
            _say(f"standard output cannot be written: {error.strerror}")
            return 1
    hint = "" if verbose else "; run it again with -v to see where, and please report it"
    _say(f"{type(error).__name__}: {error}{hint}")
    return 1


def _is_out_of_memory(error: BaseException) -> bool:
    """Python's own kind, CUDA's, and the plain RuntimeError of torch's CPU allocator."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _say(message: str) -> None:
    from longread.render import Screen

    Screen(sys.stdout, sys.stderr).error(message)


def _prepare_streams() -> None:
    # A closed stream is None in Python; writing to it must not be an error of ours.
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(encoding="utf-8", errors="replace")
    reconfigure = getattr(sys.stdin, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")  # a question may hold any byte


def _silence(stream: object) -> None:
    """Point a stream that cannot be written at nothing, so that the exit's flush is quiet."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())  # type: ignore[attr-defined]
        os.close(null)
    except (OSError, ValueError, AttributeError):
        pass
