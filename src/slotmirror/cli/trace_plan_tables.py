"""What `slotmirror replay --model none` shows."""

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from slotmirror.cli.units import count, percent
from slotmirror.engine.planning import TracePlan


def show_trace_plan(console: Console, path: Path, plan: TracePlan) -> None:
    """Print the size of the trace, its three rates, and what the pool reaches."""
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
    if plan.pool is not None and plan.pool_rate is not None:
        table.add_section()
        pool = plan.pool
        table.add_row(
            f"engine rate, {count(pool.num_blocks)} blocks",
            percent(plan.pool_rate),
            "one request after another",
        )
        table.add_row("evictions", count(pool.evictions), "blocks dropped for other content")
        table.add_row("requests too long", count(pool.requests_too_long), "never fit, not served")
    console.print(table)
