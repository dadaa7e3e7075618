"""The `meshwright` command: finds the verb, runs it, and turns errors into one line and an exit code."""

import errno
import gc
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

import click
from click.shell_completion import get_completion_class

from meshwright import __version__
from meshwright.cli.group import VerbGroup, verb_tables
from meshwright.core.errors import EX_TEMPFAIL, CannotRunError, FileWarning, InputError, StoppedError, one_line

VERBS = verb_tables()
"""Every verb, of all packages that have some."""


@click.group(cls=VerbGroup, verbs=VERBS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="meshwright")
@click.option(
    "--completion",
    type=click.Choice(("bash", "zsh", "fish")),
    callback=lambda ctx, param, shell: _print_completion(ctx, shell),
    expose_value=False,
    is_eager=True,
    help="Print the completion script of a shell.",
)
def cli() -> None:
    """From a model and a cluster to a running, measured system: plan it, prove it, run it."""


def _print_completion(ctx: click.Context, shell: str | None) -> None:
    if shell is None:
        return
    complete = get_completion_class(shell)
    assert complete is not None
    click.echo(complete(cli, {}, "meshwright", "_MESHWRIGHT_COMPLETE").source())
    ctx.exit()


NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a full disk, an exhausted quota and a limit on file sizes."""


def main() -> None:
    """Runs the command line. Exit codes: 0 done, 2 bad input, 3 nothing fits or can run, 75 a run was asked to stop and
    has written everything, 128 + n signal n ended it at once, 1 our fault."""
    # a search makes millions of short-lived values; looking for cycles among them as often as Python does costs 7%
    gc.set_threshold(50_000, 20, 50)
    sys.stdout, sys.stderr = (cast(TextIO, LastingStream(stream)) for stream in (sys.stdout, sys.stderr))
    exit_code = run(sys.argv[1:])
    if any(thread.name == "programs" for thread in threading.enumerate()):
        # a server that stops while it still compiles; a program is kept whole or not at all
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    sys.exit(exit_code)


class LastingStream:
    """A stream that goes on without its reader: a run must not end with the pager or `head` that shows it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._without_reader():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._without_reader():
            self._stream.flush()

    @contextmanager
    def _without_reader(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            # The buffer, and all later output, that of libraries too, go to the null device.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


def run(args: list[str]) -> int:
    """Returns the exit code of one call; errors and warnings go to standard error, one line each."""
    warnings.showwarning = _show_warning
    warnings.simplefilter("always", FileWarning)
    try:
        cli.main(args=args, prog_name="meshwright", standalone_mode=False)
    except StoppedError as error:
        return _fail(str(error), EX_TEMPFAIL)
    except CannotRunError as error:
        return _fail(str(error), 3)
    except InputError as error:
        return _fail(str(error), 2)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.ClickException as error:
        verb_path = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "meshwright"
        return _fail(f"{error.format_message()} See {verb_path} --help.", 2)
    except (click.exceptions.Abort, KeyboardInterrupt):
        return _fail("stopped.", 130)
    except OSError as error:
        if error.errno not in NO_ROOM:
            return _our_fault(error)
        where_text = f" writing {error.filename}" if error.filename else ""
        return _fail(f"no room{where_text}: {os.strerror(error.errno)}. Free some; a run with checkpoints resumes.", 3)
    except Exception as error:
        return _our_fault(error)
    return 0


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Shows this package's warnings in one line, others as Python does."""
    from meshwright.cli.progress import erase_progress

    erase_progress()
    origin = "meshwright" if issubclass(category, FileWarning) else f"{filename}:{lineno}: {category.__name__}"
    click.echo(one_line(f"{origin}: {message}"), err=True)


def _our_fault(error: Exception) -> int:
    if os.environ.get("MESHWRIGHT_DEBUG"):
        traceback.print_exception(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    error_line = f"{type(error).__name__}: {error}".splitlines()[0]
    return _fail(f"internal error at {frame.name}:{frame.lineno}: {error_line} (MESHWRIGHT_DEBUG=1 shows more)", 1)


def _fail(message: str, exit_code: int) -> int:
    click.echo(one_line(f"meshwright: {message}"), err=True)
    return exit_code
