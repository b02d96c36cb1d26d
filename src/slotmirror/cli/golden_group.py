"""A command group that also takes files: `slotmirror golden FILE…` is `golden replay FILE…`."""

from typing import Any

from typer.core import TyperGroup

DEFAULT_COMMAND = "replay"


class FilesOrCommand(TyperGroup):
    """Where the first argument names no command, it is the first argument of `replay`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first = args[0] if args else "--help"
        if first not in self.commands and first not in ctx.help_option_names:
            args = [DEFAULT_COMMAND, *args]
        return super().parse_args(ctx, args)
