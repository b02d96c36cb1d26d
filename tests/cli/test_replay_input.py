"""`slotmirror replay`: bad input is one line and exit code 2; planning without a model."""

import json
from pathlib import Path

import pytest

from slotmirror.backends.cpu_ref.backend import CpuRefBackend
from slotmirror.core.backend import Probe
from support.cli_runs import error_line, run_cli, table_rows
from support.trace_files import block_request, write_json_lines, write_small_chat


@pytest.fixture
def chat_file(tmp_path: Path) -> Path:
    return write_small_chat(tmp_path / "chat.jsonl")


def test_a_bad_line_is_named(chat_file: Path) -> None:
    """File, line and reason on one line; nothing was served."""
    chat_file.write_text(chat_file.read_text() + '{"messages": "none"}\n')
    result = run_cli("replay", chat_file)
    assert result.exit_code == 2
    assert error_line(result) == f"error: {chat_file}:3: messages must be a list, not text"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """The system's reason is shown."""
    path = tmp_path / "none.jsonl"
    result = run_cli("replay", path)
    assert result.exit_code == 2
    assert error_line(result) == f"error: {path}: cannot be read: No such file or directory"


def test_an_unknown_backend_is_named_with_those_installed(chat_file: Path) -> None:
    """The error says which backends there are."""
    result = run_cli("replay", chat_file, "--backend", "abacus")
    assert result.exit_code == 2
    line = error_line(result)
    assert line.startswith("error: no backend 'abacus'; installed: ")
    assert "cpu_ref" in line


def test_an_unavailable_backend_says_why(chat_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason of its probe is shown."""
    monkeypatch.setattr(
        CpuRefBackend, "probe", lambda: Probe(available=False, reason="the host is away")
    )
    result = run_cli("replay", chat_file, "--backend", "cpu_ref")
    assert result.exit_code == 2
    assert error_line(result) == "error: backend 'cpu_ref' is unavailable: the host is away"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--scale", 3), "scale=3: must be one of 1, 2, 4, 8, 16, 32, 64, 128"),
        (("--limit", 0), "limit=0: must be at least 1"),
        (("--output-tokens-max", 0), "output_tokens_max=0: must be at least 1"),
        (("--num-blocks", 1), "num_blocks=1 of stage 'thinker': must be a whole number >= 2"),
        (("--block-size", 0), "block_size=0 of stage 'thinker': must be a whole number >= 1"),
    ],
)
def test_settings_out_of_range_are_refused(
    chat_file: Path, options: tuple[str, int], message: str
) -> None:
    """The error names the setting and its value."""
    result = run_cli("replay", chat_file, "--model", "fingerprint", *options)
    assert result.exit_code == 2
    assert error_line(result) == f"error: {message}"


def test_a_request_that_never_fits_is_refused(chat_file: Path) -> None:
    """The error names the request and the setting to raise."""
    result = run_cli("replay", chat_file, "--model", "fingerprint", "--num-blocks", 4)
    assert result.exit_code == 2
    line = error_line(result)
    assert line.startswith("error: request 'line1-turn1' needs ")
    assert "raise num_blocks=4" in line


def test_a_report_that_cannot_be_written_is_refused_before_the_work(
    chat_file: Path, tmp_path: Path
) -> None:
    """A missing folder, or a folder in place of the file."""
    path = tmp_path / "none" / "report.json"
    result = run_cli("replay", chat_file, "--json", path)
    assert result.exit_code == 2
    assert error_line(result) == (
        f"error: json={str(path)!r}: cannot be written: no such folder, or no permission"
    )
    result = run_cli("replay", chat_file, "--json", tmp_path)
    assert result.exit_code == 2
    assert error_line(result) == f"error: json={str(tmp_path)!r}: is a folder, not a file"


def test_planning_prints_three_rates(tmp_path: Path) -> None:
    """Two equal prompts of two blocks and a part: token, block and engine rate, and no pool."""
    trace = write_json_lines(
        tmp_path / "trace.jsonl",
        [block_request(1124, 5, [0, 1, 2]), block_request(1124, 7, [0, 1, 2])],
    )
    result = run_cli("replay", trace, "--model", "none", "--json", tmp_path / "plan.json")
    assert result.exit_code == 0, result.output
    rows = table_rows(result.stdout)
    assert rows["token rate"][0] == rows["block rate"][0] == "50.00%"
    assert rows["engine rate"][0] == f"{1024 / 2248:.2%}"
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["engine_rate"] == 1024 / 2248
    assert (plan["requests"], plan["output_tokens"], plan["pools"]) == (2, 12, [])


def test_planning_with_a_pool(tmp_path: Path) -> None:
    """The pool's rate, evictions and refused requests are shown and reported."""
    trace = write_json_lines(
        tmp_path / "trace.jsonl",
        [block_request(1124, 1, [0, 1, 2])] * 2 + [block_request(2049, 1, [0, 1, 2, 3, 4])],
    )
    result = run_cli(
        *("replay", trace, "--model", "none", "--num-blocks", 4),
        *("--json", tmp_path / "plan.json"),
    )
    assert result.exit_code == 0, result.output
    assert table_rows(result.stdout)["4"] == ["1,536", f"{1024 / 4297:.2%}", "50.00%", "0", "1"]
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["pools"] == [
        {
            "num_blocks": 4,
            "hit_tokens": 1024,
            "hit_rate": 1024 / 4297,
            "evictions": 0,
            "requests_too_long": 1,
        }
    ]


def test_planning_refuses_a_scale(tmp_path: Path) -> None:
    """Planning keeps the lengths of the file."""
    trace = write_json_lines(tmp_path / "trace.jsonl", [block_request(1, 1, [0])])
    result = run_cli("replay", trace, "--model", "none", "--scale", 2)
    assert result.exit_code == 2
    assert error_line(result) == "error: scale=2: planning keeps the trace's lengths"
