"""The command line: `slotmirror replay`, `slotmirror plan`, `slotmirror backends`.

Every command parses its options, calls one library function and renders what it returns.
"""

import typer

from slotmirror.cli.backends_command import backends
from slotmirror.cli.plan_command import plan
from slotmirror.cli.replay_command import replay

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Stage outputs of LLM pipelines, kept one row per KV slot and whole again on a hit.",
)
app.command()(replay)
app.command()(backends)
app.command()(plan)
