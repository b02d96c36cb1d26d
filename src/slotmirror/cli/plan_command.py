"""`slotmirror plan`: host memory of one cache, or of all stages of a node, before it is taken."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeAlias

import typer
from rich.table import Table
from rich.text import Text

from slotmirror.cli.bad_input import bad_input_exits
from slotmirror.cli.consoles import output_console
from slotmirror.cli.json_report import check_json_file, write_json
from slotmirror.cli.node_plan_tables import memory_json, node_json, show_node_plan
from slotmirror.cli.units import count, gib, mb
from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.errors import ConfigError
from slotmirror.core.memory_plan import MemoryPlan, plan_memory
from slotmirror.engine.node_memory import (
    memlock_limit,
    memory_limits,
    parse_key,
    plan_node,
    read_stages,
)

EXIT_DOES_NOT_FIT = 1

_Count: TypeAlias = int | None
_Keys = typer.Option(metavar="NAME:WIDTH:DTYPE", help="A per-token output; repeat for each.")
_Capacity = typer.Option(
    help="Rows of a staging page: the engine's batched tokens. (default: 1024)"
)
_Stages = typer.Option(
    metavar="FILE.toml",
    help="A pipeline's stages, a TOML table each; instead of the options above.",
)
_Memory = typer.Option(
    "--memory-limit", metavar="SIZE", help="The node's memory instead of this machine's: 256GiB."
)
_Memlock = typer.Option(
    "--memlock-limit",
    metavar="SIZE",
    help="The node's ulimit -l instead of this machine's; or 'unlimited'.",
)


def plan(
    num_blocks: Annotated[_Count, typer.Option(help="Blocks of the engine's KV pool.")] = None,
    block_size: Annotated[_Count, typer.Option(help="Slots per block.")] = None,
    key: Annotated[list[str] | None, _Keys] = None,
    staging_depth: Annotated[
        _Count, typer.Option(help="Steps that may be unconsumed at once. (default: 4)")
    ] = None,
    staging_capacity_tokens: Annotated[_Count, _Capacity] = None,
    stages: Annotated[Path | None, _Stages] = None,
    replicas: Annotated[_Count, typer.Option(help="Pipelines on the node. (default: 1)")] = None,
    memory: Annotated[str | None, _Memory] = None,
    memlock: Annotated[str | None, _Memlock] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the plan here too.")
    ] = None,
) -> None:
    """Print the host memory of a cache, or, with --stages, of a node beside its limits.

    Exit code 1: a limit of the node is too small. 2: bad input.
    """
    of_cache = {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "key": key or None,
        "staging_depth": staging_depth,
        "staging_capacity_tokens": staging_capacity_tokens,
    }
    of_node = {"replicas": replicas, "memory_limit": memory, "memlock_limit": memlock}
    with bad_input_exits():
        check_json_file(json_file)
        if stages is None:
            _refuse(of_node, "is for the node that --stages describes")
            _plan_cache(of_cache, key or [], json_file)
            return
        _refuse(of_cache, "belongs into the file that --stages names")
        fits = _plan_node(stages, replicas, memory, memlock, json_file)
    if not fits:
        raise typer.Exit(EXIT_DOES_NOT_FIT)


def _refuse(settings: Mapping[str, object], rule: str) -> None:
    for setting, value in settings.items():
        if value is not None:
            raise ConfigError(setting, value, rule)


def _plan_cache(settings: Mapping[str, object], keys: list[str], json_file: Path | None) -> None:
    given = {setting: value for setting, value in settings.items() if value is not None}
    for setting in ("num_blocks", "block_size", "key"):
        if setting not in given:
            raise ConfigError(setting, None, "must be given, or all stages with --stages")
    del given["key"]
    config = PrefixCacheConfig(**given)  # type: ignore[arg-type]  # typer gives whole numbers
    memory = plan_memory(config, map(parse_key, keys))
    sizes = {"num_blocks": config.num_blocks, "block_size": config.block_size}
    write_json(json_file, sizes | memory_json(memory))
    output_console().print(_table(config, memory))


def _plan_node(
    stages: Path,
    replicas: int | None,
    memory: str | None,
    memlock: str | None,
    json_file: Path | None,
) -> bool:
    """Whether it fits."""
    node = plan_node(read_stages(stages), 1 if replicas is None else replicas)
    verdicts = node.verdicts(memory_limits(memory), memlock_limit(memlock))
    write_json(json_file, node_json(node, verdicts))
    show_node_plan(output_console(), node, verdicts)
    return all(verdict.fits for verdict in verdicts)


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
