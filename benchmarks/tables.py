"""Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(headings: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """A table; every row has as many cells as there are headings."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
