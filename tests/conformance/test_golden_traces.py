"""Golden traces: recorded from the reference, proven first, reproduced by every backend."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slotmirror.backends.cpu_ref import CpuRefBackend
from slotmirror.conformance.golden.check import MODES, check_traces
from slotmirror.conformance.golden.record import record_trace, record_traces
from slotmirror.conformance.golden.recording import (
    Recording,
    Take,
    read_recordings,
    write_recordings,
)
from slotmirror.conformance.simulated import PROFILES, SimulatedBackend
from slotmirror.conformance.traces.generate import draw_trace
from slotmirror.conformance.traces.plain_model import WrongDelivery
from slotmirror.conformance.traces.scenarios import scenarios
from slotmirror.core.errors import ConfigError
from slotmirror.core.slot_table import SlotTable
from support.cli_runs import error_line, run_cli

SHIPPED = read_recordings()


def test_the_shipped_file_is_what_the_reference_gives_today(tmp_path: Path) -> None:
    """Recording again gives the same file, byte for byte; it stays below a megabyte."""
    record_traces(tmp_path / "again.json")
    again = (tmp_path / "again.json").read_bytes()
    shipped = Path(__file__).parents[2] / "conformance/golden/data/stage_traces.json"
    assert again == shipped.read_bytes()
    assert len(again) < 1_000_000


def test_the_shipped_traces_mix_everything() -> None:
    """Hits, resets, replacements, drafts, preemptions, discards, deferred keys, leftovers."""
    steps = [step for recording in SHIPPED for step in recording.steps]
    events = [step.events for step in steps]
    takes = [take for step in steps for take in step.takes]
    assert sum(one.num_computed_tokens > 0 for e in events for one in e.new) > 100
    assert sum(len(e.resumed) for e in events) > 10
    assert sum(len(e.replaced) for e in events) > 10
    assert sum(len(e.drafted) for e in events) > 10
    assert sum(bool(step.reset) for step in steps) > 5
    assert sum(step.leftover for step in steps) > 50
    assert sum(take.sha256 == "" for take in takes) > 10
    assert sum(bool(recording.policy["deferred_keys"]) for recording in SHIPPED) > 20


@pytest.mark.parametrize("profile", ["plain", "synchronous"])
def test_the_simulated_device_reproduces_them(profile: str) -> None:
    """Late copies, poisoned buffers, four modes of the cache: the same bytes (H5)."""
    report = check_traces(
        SHIPPED[:16], "simulated", lambda: SimulatedBackend(profile=PROFILES[profile], seed=5)
    )
    assert report.differences == []
    assert report.ok
    assert report.takes > 500


def test_the_reference_reproduces_them_in_every_mode() -> None:
    """Threaded and inline, prefetch on and off."""
    report = check_traces(SHIPPED[:16], "cpu_ref", CpuRefBackend)
    assert report.ok
    assert len(MODES) == 4


def tampered(recording: Recording) -> Recording:
    """The recording with another hash for its last take."""
    *others, last = recording.last_takes
    return replace(recording, last_takes=(*others, Take(last.step, last.req_ids, "0" * 64)))


def test_another_delivery_is_reported_in_every_mode() -> None:
    """Trace, mode, step and both hashes are named; nothing else is said to differ."""
    recording = record_trace(next(iter(scenarios().values())), 1)
    report = check_traces([tampered(recording)], "cpu_ref", CpuRefBackend)
    assert not report.ok
    assert [found.mode for found in report.differences] == list(map(str, MODES))
    assert str(MODES[1]) == "threaded, prefetch off"
    assert {found.step for found in report.differences} == {recording.last_takes[-1].step}
    assert "recorded 000000" in report.differences[0].reason


def test_a_wrong_reference_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain model is asked first: no file is written."""
    monkeypatch.setattr(SlotTable, "claim", lambda self, slots: None)
    with pytest.raises(WrongDelivery):
        record_traces(tmp_path / "wrong.json")
    assert not (tmp_path / "wrong.json").exists()


def test_a_recording_survives_its_file(tmp_path: Path) -> None:
    """Written and read it plays the same."""
    recording = record_trace(draw_trace(77)[0], 3)
    write_recordings(tmp_path / "one.json", [recording])
    [back] = read_recordings(tmp_path / "one.json")
    assert back.config == recording.config
    assert back.last_takes == recording.last_takes
    assert check_traces([back], "cpu_ref", CpuRefBackend).ok


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is no file of golden traces"),
        ('{"format": 99, "traces": []}', "has format 99, not 1"),
        ('{"format": 1}', "is no file of golden traces"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, says: str) -> None:
    """One line, exit code 2, and the file's name."""
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_recordings(path)
    result = run_cli("golden", "check", "--backend", "cpu_ref", path)
    assert result.exit_code == 2
    assert "other.json" in error_line(result)


def test_the_commands_record_and_check(tmp_path: Path) -> None:
    """A recorded file is reproduced, exit code 0; a tampered one is not, exit code 1."""
    path = tmp_path / "few.json"
    assert run_cli("golden", "record", path, "--traces", 2).exit_code == 0
    result = run_cli("golden", "check", "--backend", "simulated", path)
    assert result.exit_code == 0
    assert "simulated: 8 traces" in result.stdout
    assert "0 different" in result.stdout
    write_recordings(path, [tampered(one) for one in read_recordings(path)])
    result = run_cli("golden", "check", "--backend", "cpu_ref", path)
    assert result.exit_code == 1
    assert "32 different" in result.stdout


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """A folder that does not exist: one line, exit code 2."""
    result = run_cli("golden", "record", tmp_path / "none" / "x.json", "--traces", 1)
    assert result.exit_code == 2
    assert "cannot be written" in error_line(result)


def test_vectors_of_the_kv_prefix_cache_are_replayed() -> None:
    """`golden replay` compares a file of vectors; one that is no such file has exit code 2."""
    vectors = Path(__file__).parents[1] / "golden" / "vllm_kv_prefix_cache.json"
    result = run_cli("golden", "replay", vectors)
    assert result.exit_code == 0
    assert "0 different" in result.stdout
    result = run_cli("golden", "replay", Path(__file__))
    assert result.exit_code == 2
    assert "is not JSON" in error_line(result)
