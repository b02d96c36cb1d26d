"""`slotmirror plan`: the host memory of a configuration, before anything is allocated."""

from typing import Annotated

import torch
import typer
from rich.table import Table
from rich.text import Text

from slotmirror.cli.bad_input import bad_input_exits
from slotmirror.cli.consoles import output_console
from slotmirror.cli.units import count, gib, mb
from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.errors import ConfigError
from slotmirror.core.key_spec import KeySpec
from slotmirror.core.memory_plan import MemoryPlan, plan_memory

_KEY_RULE = "must be NAME:WIDTH:DTYPE, such as hidden:2048:bfloat16 or codes:4x16:int64"


def plan(
    num_blocks: Annotated[int, typer.Option(help="Blocks of the engine's KV pool.")],
    block_size: Annotated[int, typer.Option(help="Slots per block.")],
    key: Annotated[
        list[str],
        typer.Option(
            metavar="NAME:WIDTH:DTYPE", help="One per-token output; repeat for each of them."
        ),
    ],
    staging_depth: Annotated[int, typer.Option(help="Steps that may be unconsumed at once.")] = 4,
    staging_capacity_tokens: Annotated[
        int, typer.Option(help="Rows of a staging page: the engine's batched tokens.")
    ] = 1024,
) -> None:
    """Print the host memory that these keys take, in all and by class."""
    with bad_input_exits():
        config = PrefixCacheConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            staging_depth=staging_depth,
            staging_capacity_tokens=staging_capacity_tokens,
        )
        memory = plan_memory(config, [parse_key(text) for text in key])
    output_console().print(_table(config, memory))


def parse_key(text: str) -> KeySpec:
    """The key that `NAME:WIDTH:DTYPE` describes; several dimensions are joined by `x`.

    Raises:
        ConfigError: the text has another form, a dimension below 1 or an unknown dtype.
    """
    parts = text.rsplit(":", maxsplit=2)
    if len(parts) != 3 or not parts[0]:
        raise ConfigError("key", text, _KEY_RULE)
    name, shape, dtype_name = parts
    sizes = shape.split("x")
    if not all(size.isascii() and size.isdigit() and int(size) > 0 for size in sizes):
        raise ConfigError("key", text, _KEY_RULE)
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError("key", text, f"torch has no dtype {dtype_name!r}")
    return KeySpec(name, tuple(map(int, sizes)), dtype)


def _table(config: PrefixCacheConfig, memory: MemoryPlan) -> Table:
    table = Table(
        title=f"Host memory for {count(config.num_blocks)} blocks of {config.block_size} slots"
    )
    table.add_column("what")
    for unit in ("GiB", "MB", "bytes"):
        table.add_column(unit, justify="right")

    def row(what: str, num_bytes: int, style: str | None = None) -> None:
        table.add_row(Text(what), gib(num_bytes), mb(num_bytes), count(num_bytes), style=style)

    for entry in memory.keys:
        row(f"pool, {entry.key}", entry.pool_bytes)
        row(f"staging, {entry.key}", entry.staging_bytes)
    table.add_section()
    row("pools", memory.pool_bytes)
    row("staging pages", memory.staging_bytes)
    row("in all", memory.host_bytes, style="bold")
    return table
