"""What `slotmirror plan --stages` shows, and the same for machines."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from slotmirror.cli.units import binary, count
from slotmirror.core.memory_plan import MemoryPlan
from slotmirror.engine.node_memory import NodePlan, StageMemory, Verdict


def show_node_plan(console: Console, node: NodePlan, verdicts: Sequence[Verdict]) -> None:
    """Bytes by stage and class, what is in no figure, and a line for each limit."""
    console.print(_table(node))
    for name in node.unbounded_stages:
        line = f"hit outputs of {name!r} are not counted: hit_buffer_bytes_max sets no bound"
        console.print(line, markup=False)
    for verdict in verdicts:
        style = "green" if verdict.fits else "red"
        console.print(Text(verdict_line(verdict), style), soft_wrap=True)


def verdict_line(verdict: Verdict) -> str:
    """Need, limit and where it stands; what is left, or what to change."""
    limit, needed = verdict.limit, binary(verdict.needed_bytes)
    if limit.num_bytes is None:
        return f"fits: {verdict.subject} {needed}; {limit.name} unlimited ({limit.source})"
    figures = f"{verdict.subject} {needed}; {limit.name} {binary(limit.num_bytes)} ({limit.source})"
    if verdict.fits:
        return f"fits: {figures}; {binary(limit.num_bytes - verdict.needed_bytes)} left"
    return f"does not fit: {figures}; {verdict.remedy}"


def _table(node: NodePlan) -> Table:
    """One process of each stage, and the sum over all processes."""
    table = Table(
        title=f"Host memory by process, and of the node (replicas: {count(node.replicas)})"
    )
    table.add_column("stage")
    columns = ("processes", "pools", "pages", "bounce", "hit outputs", "rounding", "in all")
    for column in (*columns, "page-locked"):
        table.add_column(column, justify="right")
    for stage in node.stages:
        processes = count(node.replicas * stage.settings.processes)
        table.add_row(Text(stage.settings.name), processes, *map(binary, _classes(stage)))
    table.add_section()
    totals = (binary(node.host_bytes), binary(node.pinned_bytes))
    blanks = [""] * (len(columns) - 2)
    processes = count(node.replicas * sum(stage.settings.processes for stage in node.stages))
    table.add_row("node", processes, *blanks, *totals, style="bold")
    return table


def _classes(stage: StageMemory) -> tuple[int, ...]:
    memory = stage.memory
    return (
        memory.pool_bytes,
        memory.staging_bytes,
        memory.bounce_bytes,
        stage.hit_output_bytes,
        stage.rounding_bytes,
        stage.host_bytes,
        stage.pinned_bytes,
    )


def memory_json(memory: MemoryPlan) -> dict[str, object]:
    """A cache's bytes by key and class, as plain values."""
    return {
        "keys": [
            {
                "name": entry.key.name,
                "row_bytes": entry.key.row_bytes,
                "pool_bytes": entry.pool_bytes,
                "staging_bytes": entry.staging_bytes,
            }
            for entry in memory.keys
        ],
        "pool_bytes": memory.pool_bytes,
        "staging_bytes": memory.staging_bytes,
        "bounce_bytes": memory.bounce_bytes,
        "host_bytes": memory.host_bytes,
    }


def node_json(node: NodePlan, verdicts: Sequence[Verdict]) -> dict[str, object]:
    """The node's plan as plain values; a stage's figures are of one process."""
    return {
        "replicas": node.replicas,
        "host_bytes": node.host_bytes,
        "pinned_bytes": node.pinned_bytes,
        "fits": all(verdict.fits for verdict in verdicts),
        "stages": [
            memory_json(stage.memory)
            | {
                "name": stage.settings.name,
                "processes": stage.settings.processes,
                "hit_output_bytes": stage.hit_output_bytes,
                "rounding_bytes": stage.rounding_bytes,
                "host_bytes": stage.host_bytes,
                "pinned_bytes": stage.pinned_bytes,
            }
            for stage in node.stages
        ],
        "unbounded_stages": node.unbounded_stages,
        "verdicts": [
            {
                "subject": verdict.subject,
                "needed_bytes": verdict.needed_bytes,
                "limit": verdict.limit.name,
                "limit_bytes": verdict.limit.num_bytes,
                "source": verdict.limit.source,
                "fits": verdict.fits,
                "remedy": None if verdict.fits else verdict.remedy,
            }
            for verdict in verdicts
        ],
    }
