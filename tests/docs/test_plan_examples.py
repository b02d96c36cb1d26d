"""The `slotmirror plan` commands of the pages print what the pages show."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from support.cli_runs import run_cli
from support.markdown_pages import blocks_of, transcripts_of
from support.source_tree import ROOT

PAGES = ("docs/deploy-nvidia.md", "docs/deploy-ascend.md")


@pytest.mark.parametrize("page", PAGES)
def test_the_plans_of_a_page_print_what_it_shows(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's file is `pipeline.toml`; the lines below a command are its verdicts."""
    text = (ROOT / page).read_text(encoding="utf-8")
    [pipeline] = blocks_of(text, "toml")
    (tmp_path / "pipeline.toml").write_text(pipeline, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    plans = [
        (shlex.split(command)[1:], shown)
        for command, shown in transcripts_of(text)
        if command.startswith("slotmirror plan ")
    ]
    assert len(plans) == 2
    for arguments, shown in plans:
        result = run_cli(*arguments)
        assert result.exit_code == any(line.startswith("does not fit") for line in shown)
        assert result.stdout.splitlines()[-len(shown) :] == shown


def test_the_stage_file_of_the_reference_page_is_read(tmp_path: Path) -> None:
    """Every setting that it shows exists."""
    text = (ROOT / "docs" / "stage-cache.md").read_text(encoding="utf-8")
    [pipeline] = blocks_of(text, "toml")
    file = tmp_path / "pipeline.toml"
    file.write_text(pipeline, encoding="utf-8")
    result = run_cli("plan", "--stages", file, "--memory-limit", "1t", "--memlock-limit", "1g")
    assert result.exit_code == 0, result.output
