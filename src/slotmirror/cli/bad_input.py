"""Bad input ends a command with one line and exit code 2; a bug keeps its traceback."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from slotmirror.cli.consoles import error_console
from slotmirror.core.errors import BackendError, UsageError
from slotmirror.engine.errors import RequestError

EXIT_BAD_INPUT = 2


@contextmanager
def bad_input_exits() -> Iterator[None]:
    """Turn errors that the user can mend into a line on stderr and exit code 2."""
    try:
        yield
    except (UsageError, BackendError, RequestError) as error:
        console = error_console()
        console.print("error:", style="bold red", end=" ")
        console.print(str(error), markup=False)
        raise typer.Exit(EXIT_BAD_INPUT) from error
