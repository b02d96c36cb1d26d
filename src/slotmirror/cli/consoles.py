"""Consoles that print text as it is: names and errors of others are shown, never interpreted."""

from rich.console import Console


def output_console() -> Console:
    """Standard output."""
    return Console(emoji=False, highlight=False)


def error_console() -> Console:
    """Standard error; lines are not broken, so that an error stays one line."""
    return Console(emoji=False, highlight=False, stderr=True, soft_wrap=True)
