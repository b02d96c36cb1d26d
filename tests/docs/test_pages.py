"""Every documented block runs, every relative link resolves, README opens with two commands."""

from __future__ import annotations

import re

import pytest

from support.markdown_pages import broken_links, commands_of, script_of
from support.scripts import script_error
from support.source_tree import ROOT, markdown_files

SCRIPTS = {
    str(page.relative_to(ROOT)): script
    for page in markdown_files()
    if (script := script_of(page.read_text(encoding="utf-8")))
}


def name_of(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", SCRIPTS)
def test_the_python_blocks_of_a_page_run(page, tmp_path):
    """The page's blocks, joined into one script, run without error or warning."""
    script = tmp_path / "page.py"
    script.write_text(SCRIPTS[page], encoding="utf-8")
    folder = tmp_path / "empty"
    folder.mkdir()
    assert script_error(script, folder) == ""


@pytest.mark.parametrize("page", markdown_files(), ids=name_of)
def test_every_relative_link_resolves(page):
    """Links lead to a file of the repository, and to a heading where they name one."""
    assert broken_links(page, page.read_text(encoding="utf-8"), ROOT) == []


def test_readme_opens_with_run_and_test():
    """The first two commands a reader meets are ``make run`` and ``make test``."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert commands_of(readme)[:2] == ["make run", "make test"]


def unlisted_rooms(page):
    """Files of core/ that the map does not name, and names on it that are no file there."""
    named = set(re.findall(r"`([a-z_]+\.py)`", page[page.index("## The rooms") :]))
    rooms = {path.name for path in (ROOT / "core").glob("*.py")} - {"__init__.py"}
    return sorted(named ^ rooms)


def test_the_map_of_core_names_every_room():
    """Each file of core/ stands on the map, and nothing that is gone does."""
    page = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    assert unlisted_rooms(page) == []
    assert unlisted_rooms(page.replace("`oplog.py`", "`opjournal.py`")) == [
        "opjournal.py",
        "oplog.py",
    ]
