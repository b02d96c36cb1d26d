"""The command line: `slotmirror replay`, `plan`, `backends`, `conformance`, `explore`, `soak`,
`golden`.

Every command parses its options, calls one library function and renders what it returns.
"""

import typer

import slotmirror.cli.autoload  # noqa: F401 - before torch  # isort: split
from slotmirror.cli.backends_command import backends
from slotmirror.cli.calibrate_command import calibrate_backend
from slotmirror.cli.conformance_command import conformance
from slotmirror.cli.explore_command import explore
from slotmirror.cli.golden_command import golden
from slotmirror.cli.plan_command import plan
from slotmirror.cli.replay_command import replay
from slotmirror.cli.soak_command import soak

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Stage outputs of LLM pipelines, kept one row per KV slot and whole again on a hit.",
)
app.command()(replay)
app.command()(backends)
app.command()(conformance)
app.command()(plan)
app.command("calibrate")(calibrate_backend)
app.command()(explore)
app.command()(soak)
app.add_typer(golden, name="golden")
