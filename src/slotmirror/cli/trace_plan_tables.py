"""What `slotmirror replay --model none` shows."""

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from slotmirror.cli.units import count, percent
from slotmirror.engine.planning import TracePlan


def show_trace_plan(console: Console, path: Path, plan: TracePlan) -> None:
    """Print the size of the trace, its three rates, and what each pool reaches."""
    rates = plan.rates
    table = Table(title=Text(f"{path.name} ({plan.format}), blocks of {rates.block_size} tokens"))
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_column("counted as")
    table.add_row("requests", count(rates.requests))
    table.add_row("prompt tokens", count(rates.prompt_tokens))
    table.add_row("output tokens", count(rates.output_tokens))
    table.add_row(
        "distinct whole blocks", count(rates.distinct_blocks), "what never to evict takes"
    )
    table.add_section()
    table.add_row("token rate", percent(rates.token_rate), "hit tokens over prompt tokens")
    table.add_row(
        "block rate", percent(rates.block_rate), "hit blocks over blocks, partial ones too"
    )
    table.add_row(
        "engine rate", percent(rates.engine_rate), "whole blocks only, last token recomputed"
    )
    console.print(table)
    if plan.pools:
        console.print(_pool_table(plan))


def _pool_table(plan: TracePlan) -> Table:
    """Hit rate against capacity."""
    table = Table(title="Hit rate against capacity, one request after another")
    for column in ("blocks", "tokens", "engine rate", "of the most", "evictions", "too long"):
        table.add_column(column, justify="right")
    most = plan.rates.engine_rate
    for pool in sorted(plan.pools, key=lambda pool: pool.num_blocks):
        rate = plan.rate_of(pool)
        table.add_row(
            count(pool.num_blocks),
            count((pool.num_blocks - 1) * plan.rates.block_size),
            percent(rate),
            percent(rate / most if most else 1.0),
            count(pool.evictions),
            count(pool.requests_too_long),
        )
    return table
