"""What a Markdown page promises: scripts, commands and links."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from markdown_it import MarkdownIt
from markdown_it.token import Token

_PYTHON = frozenset({"py", "python", "python3"})
_SHELL = frozenset({"bash", "console", "sh", "shell"})
_OPT_OUT = re.compile(r"<!-- not executed: \S.* -->")


class Link(NamedTuple):
    line: int
    target: str


def script_of(text: str) -> str:
    """The page's Python blocks as one script, each line under its number on the page.

    A block is left out only by ``<!-- not executed: reason -->`` on the line before it. The
    result is empty where no block is left.
    """
    lines = text.splitlines()
    script = [""] * len(lines)
    for fence in _fences(text, _PYTHON):
        start, _ = fence.map or (0, 0)
        if start > 0 and _OPT_OUT.fullmatch(lines[start - 1].strip()):
            continue
        block = fence.content.splitlines()
        script[start + 1 : start + 1 + len(block)] = block
    return "\n".join(script) + "\n" if any(script) else ""


def commands_of(text: str) -> list[str]:
    """The commands in the page's shell blocks; in ``console`` blocks only lines after ``$``."""
    commands = []
    for fence in _fences(text, _SHELL):
        shows_output = fence.info.split()[0] == "console"
        for line in fence.content.splitlines():
            command = line.removeprefix("$ ").split(" #")[0].strip()
            is_output = shows_output and not line.startswith("$ ")
            if command and not command.startswith("#") and not is_output:
                commands.append(command)
    return commands


def links_of(text: str) -> list[Link]:
    """Targets of all links and images, reference style included, with the line they stand on."""
    return [
        Link((block.map or (0, 0))[0] + 1, str(target))
        for block in MarkdownIt().parse(text)
        for token in block.children or []
        if (target := token.attrGet("href") or token.attrGet("src"))
    ]


def anchors_of(text: str) -> set[str]:
    """The fragments that the page's headings answer to, by GitHub's rule."""
    tokens = MarkdownIt().parse(text)
    titles = [
        following.content for token, following in pairwise(tokens) if token.type == "heading_open"
    ]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path, text: str, root: Path) -> list[str]:
    """Relative links to a file or heading that the repository lacks, or to outside of it."""
    return [
        f"{page.relative_to(root)}:{link.line}: {link.target} {problem}"
        for link in links_of(text)
        if (problem := _problem(link.target, page, text, root))
    ]


def _problem(target: str, page: Path, text: str, root: Path) -> str:
    parts = urlsplit(target)
    if parts.scheme or parts.netloc:
        return ""
    path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if not path.is_relative_to(root):
        return "leaves the repository"
    if not path.exists():
        return "does not exist"
    if parts.fragment and path.suffix == ".md":
        other = text if path == page else path.read_text(encoding="utf-8")
        return "" if parts.fragment in anchors_of(other) else "names no heading"
    return ""


def _fences(text: str, languages: frozenset[str]) -> list[Token]:
    return [
        token
        for token in MarkdownIt().parse(text)
        if token.type == "fence" and not languages.isdisjoint(token.info.split()[:1])
    ]


def transcripts_of(text: str) -> list[tuple[str, list[str]]]:
    """Commands after ``$`` in ``console`` blocks, continued lines joined, and the output shown."""
    found: list[tuple[str, list[str]]] = []
    for fence in _fences(text, frozenset({"console"})):
        for line in fence.content.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                found.append((line.removeprefix("$ "), []))
            else:
                found[-1][1].append(line)
    return found


def blocks_of(text: str, language: str) -> list[str]:
    """The contents of the page's blocks in this language."""
    return [fence.content for fence in _fences(text, frozenset({language}))]
