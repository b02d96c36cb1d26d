"""`slotmirror golden FILE…`: exit code 0 if all vectors agree, 1 if one differs, 2 on bad input."""

import json
import sys
from pathlib import Path

import pytest

from support.cli_runs import error_line, run_cli
from support.source_tree import ROOT

GOLDEN = ROOT / "tests" / "golden" / "vllm_kv_prefix_cache.json"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A file with the byte forms of hashes and the first manager trace."""
    data = json.loads(GOLDEN.read_text(encoding="utf-8"))
    path = tmp_path / "small.json"
    parts = {"misc": data["misc"], "manager_traces": data["manager_traces"][:1]}
    path.write_text(json.dumps(parts))
    return path


def plant(path: Path, folder: Path) -> Path:
    """The file with one wrong byte."""
    data = json.loads(path.read_text())
    data["misc"]["group_key"]["key"] = "00"
    planted = folder / "planted.json"
    planted.write_text(json.dumps(data))
    return planted


def test_the_handed_file_agrees() -> None:
    """Every part of the file is replayed; nothing differs but the two listed exceptions."""
    result = run_cli("golden", GOLDEN)
    assert result.exit_code == 0, result.output
    assert "232 hash vectors, 1,140 manager operations, 300 scheduler steps" in result.stdout
    assert "0 different, 2 different on purpose" in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize("command", [("golden",), ("golden", "replay")])
def test_one_differing_file_among_several_is_exit_code_1(
    small: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    """All files are replayed; the difference is shown with its place and both values."""
    result = run_cli(*command, small, plant(small, tmp_path))
    assert result.exit_code == 1
    assert result.stdout.count("manager operations") == 2
    assert "misc/group_key: key should be '00', is 'e14b" in result.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [("not JSON", "is not JSON"), ("{}", "it holds no vectors"), (None, "No such file")],
)
def test_bad_input_is_exit_code_2(tmp_path: Path, text: str | None, message: str) -> None:
    """A missing file, another kind of file: one line on stderr names it."""
    path = tmp_path / "other.json"
    if text is not None:
        path.write_text(text)
    result = run_cli("golden", path)
    assert result.exit_code == 2
    line = error_line(result)
    assert message in line
    assert "other.json" in line


def test_a_missing_package_is_exit_code_2(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of event batches need an extra: the error names it."""
    monkeypatch.setitem(sys.modules, "msgspec.msgpack", None)
    result = run_cli("golden", small)
    assert result.exit_code == 2
    assert "pip install 'slotmirror[events]'" in error_line(result)


def test_the_commands_are_still_reached() -> None:
    """Help and the other commands of the group are not taken for files."""
    for arguments in (("--help",), ("check", "--help"), ()):
        assert "Usage" in run_cli("golden", *arguments).output
