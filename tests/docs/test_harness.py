"""The checks of the pages catch what they are for, on planted pages."""

from __future__ import annotations

from support.markdown_pages import anchors_of, broken_links, commands_of, script_of
from support.scripts import script_error

PAGE = """\
# A page

```python
x = 1
```

<!-- not executed: needs two machines -->
```python
raise SystemExit("left out")
```

<!-- not executed: -->
```py
y = x + 1
```

- in a list

  ```python
  assert y == 2
  ```

```text
not Python
```
"""


def test_blocks_become_one_script_with_the_page_line_numbers():
    """Blocks share names, keep their line numbers, and are left out only with a reason."""
    lines = script_of(PAGE).splitlines()
    assert {number: line for number, line in enumerate(lines, start=1) if line} == {
        4: "x = 1",
        14: "y = x + 1",
        20: "assert y == 2",
    }


def test_a_page_without_blocks_is_an_empty_script():
    """Other languages and opted-out blocks leave nothing to run."""
    assert script_of("# Title\n\n```text\nx\n```\n") == ""


def test_a_planted_failing_block_is_caught(tmp_path):
    """The error names the page's own line."""
    script = tmp_path / "page.py"
    script.write_text(script_of(PAGE.replace("y == 2", "y == 3")))
    assert "line 20" in script_error(script, tmp_path)


def test_commands_are_read_in_order():
    """Comments, prompts and output are stripped; other blocks are no commands."""
    page = (
        "```sh\n# set-up\nmake run   # serves\nmake test\n```\n"
        "```console\n$ slotmirror backends\ncpu_ref available\n```\n"
        "```python\nmake = 1\n```\n"
    )
    assert commands_of(page) == ["make run", "make test", "slotmirror backends"]


def test_planted_broken_links_are_caught(tmp_path):
    """Missing files, missing headings and links out of the repository are reported by line."""
    root = tmp_path / "repository"
    (root / "docs").mkdir(parents=True)
    (tmp_path / "outside.md").touch()
    page = root / "docs" / "page.md"
    text = (
        "# One `heading`, here\n\n[ok](page.md#one-heading-here) [ok](https://x.org/y) [ok](..)\n\n"
        "[a](missing.md)\n\n[b](#no-heading)\n\n![c](../../outside.md)\n\n"
        "[d][ref]\n\n[ref]: gone/\n"
    )
    page.write_text(text)
    assert broken_links(page, text, root) == [
        "docs/page.md:5: missing.md does not exist",
        "docs/page.md:7: #no-heading names no heading",
        "docs/page.md:9: ../../outside.md leaves the repository",
        "docs/page.md:11: gone/ does not exist",
    ]


def test_anchors_follow_the_headings():
    """Case, punctuation and code marks are dropped, spaces become hyphens."""
    assert anchors_of("# Add a `backend`: how?\n\ntext\n\n## Step-by-step\n") == {
        "add-a-backend-how",
        "step-by-step",
    }
