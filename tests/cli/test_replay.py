"""`slotmirror replay` with a model: verified, compared, reported, and wrong when rows are."""

import json
from pathlib import Path
from typing import Any

import pytest

from slotmirror.backends.cpu_ref.backend import CpuRefBackend
from support.cli_runs import run_cli, table_rows
from support.trace_files import write_crowded_trace, write_small_chat

SCHEDULE_COUNTERS = (
    "hit_tokens",
    "resumed_hit_tokens",
    "prefill_tokens_computed",
    "decode_tokens",
    "preemptions",
    "steps",
)


@pytest.fixture
def chat_file(tmp_path: Path) -> Path:
    return write_small_chat(tmp_path / "chat.jsonl")


def replay_report(*arguments: object, folder: Path) -> dict[str, Any]:
    """The JSON report of a replay that must succeed."""
    path = folder / "report.json"
    result = run_cli("replay", *arguments, "--json", path)
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def test_fingerprint_replay_verifies_every_row(chat_file: Path) -> None:
    """All requests of both stages are verified and none is wrong; the table shows the hits."""
    result = run_cli("replay", chat_file, "--model", "fingerprint")
    assert result.exit_code == 0, result.output
    assert "outputs verified: 3 of 3 requests" in result.stdout
    assert "mismatches: 0" in result.stdout
    rows = table_rows(result.stdout)
    assert rows["requests"] == ["3", "3"]
    assert int(rows["hit tokens"][0]) > 200
    assert int(rows["rows gathered"][1]) == int(rows["hit tokens"][1])
    assert result.stderr == ""


def test_the_report_for_machines_has_what_the_table_shows(chat_file: Path, tmp_path: Path) -> None:
    """Counts, rates, bytes, times, options and versions under stable names."""
    report = replay_report(chat_file, "--model", "fingerprint", "--compare", folder=tmp_path)
    assert report["report_version"] == 1
    assert report["file"] == "chat.jsonl"
    assert report["format"] == "chat"
    assert report["options"]["committer"] == "threaded"
    assert report["options"]["num_blocks"] == 4096
    assert report["backend"] == "cpu_ref"
    assert {"python", "torch", "numpy", "slotmirror"} <= set(report["versions"])
    assert report["verified"]["outputs"] == report["requests"] == 3
    assert report["verified"]["mismatches"] == 0
    assert report["verified"]["first_mismatches"] == []
    for stage in report["with_caching"]["stages"].values():
        assert stage["hit_rate"] == stage["hit_tokens"] / stage["prompt_tokens"]
        assert stage["prefill_tokens_saved"] == stage["hit_tokens"]
        assert stage["prefill_tokens_computed"] + stage["hit_tokens"] == stage["prompt_tokens"]
        assert stage["preemptions"] == 0
        assert stage["cache_stats"]["rows_written"] > 0
        assert stage["host_bytes"]["pool_bytes"] > 0
    off = report["without_caching"]["stages"]["thinker"]
    assert (off["hit_tokens"], off["prefill_tokens_computed"]) == (0, off["prompt_tokens"])
    seconds = [report[run]["serving_seconds"] for run in ("with_caching", "without_caching")]
    assert min(seconds) > 0
    assert report["speedup"] == seconds[1] / seconds[0]


def test_transformer_replay_is_verified_against_a_run_without_caching(
    chat_file: Path, tmp_path: Path
) -> None:
    """The default model: the reference run is made, timed and equal within its tolerance."""
    report = replay_report(chat_file, folder=tmp_path)
    assert report["options"]["model"] == "transformer"
    assert report["ok"]
    assert report["verified"]["rows"] > 0
    assert report["without_caching"]["stages"]["talker"]["hit_tokens"] == 0


def test_verification_can_be_left_out(chat_file: Path, tmp_path: Path) -> None:
    """Then no reference run is made either, and the output says that nothing was verified."""
    report = replay_report(chat_file, "--no-verify", folder=tmp_path)
    assert report["verified"] is None
    assert report["without_caching"] is None
    assert report["speedup"] is None
    result = run_cli("replay", chat_file, "--no-verify", "--model", "fingerprint")
    assert result.exit_code == 0
    assert "outputs not verified (--no-verify)" in result.stdout


@pytest.mark.parametrize("model", ["fingerprint", "transformer"])
def test_one_wrong_row_is_exit_code_1(
    chat_file: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """One flipped bit in one row that a hit reads back is found, named and ends with 1."""
    original = CpuRefBackend.gather_slots
    planted: list[int] = []

    def gather_with_one_wrong_row(self: CpuRefBackend, pool: Any, slots: Any, out: Any) -> None:
        original(self, pool, slots, out)
        if not planted and len(slots):
            planted.append(int(slots[0]))
            # The highest bit of the first value: no tolerance covers it.
            out.view("u1").reshape(len(out), -1)[0, 3] ^= 0x40

    monkeypatch.setattr(CpuRefBackend, "gather_slots", gather_with_one_wrong_row)
    result = run_cli("replay", chat_file, "--model", model)
    assert len(planted) == 1
    assert result.exit_code == 1
    assert "wrong row" in result.stdout
    assert "mismatches: 0" not in result.stdout
    assert "request 'line" in result.stdout


def test_few_blocks_threaded_and_inline_agree(tmp_path: Path) -> None:
    """Blocks are recycled and requests preempted a hundred times; both committers serve the same
    schedule, keep the same rows, and all of them are right byte for byte.

    How many rows a resumed request reads again is no part of that: it is what was not delivered
    yet when it came back.
    """
    trace = write_crowded_trace(tmp_path / "trace.jsonl", num_requests=110)
    reports = [
        replay_report(
            *(trace, "--model", "fingerprint", "--scale", 128, "--output-tokens-max", 64),
            *("--block-size", 4, "--num-blocks", 80, "--committer", committer),
            folder=tmp_path,
        )
        for committer in ("threaded", "inline")
    ]
    schedules = [
        {
            name: (
                [stage[counter] for counter in SCHEDULE_COUNTERS],
                stage["cache_stats"]["tokens_saved"],
            )
            for name, stage in report["with_caching"]["stages"].items()
        }
        for report in reports
    ]
    assert schedules[0] == schedules[1]
    thinker = reports[0]["with_caching"]["stages"]["thinker"]
    assert thinker["preemptions"] >= 100
    assert thinker["cache_stats"]["tokens_saved"] > 20 * 80 * 4
    assert reports[0]["verified"] == reports[1]["verified"]
    assert reports[0]["verified"]["outputs"] == 110
