"""The published trace through the pipeline, shrunk, every row verified."""

import json
from pathlib import Path

from slotmirror.engine.planning import PlanOptions, plan_trace
from slotmirror.engine.traces import ReadOptions
from support.cli_runs import run_cli, table_rows
from support.real_trace import real_trace


def test_the_real_trace_is_served_and_verified(tmp_path: Path) -> None:
    """1,000 requests at 1/128 of their length in a pool that recycles every block many times."""
    report_file = tmp_path / "report.json"
    result = run_cli(
        *("replay", real_trace(), "--model", "fingerprint", "--limit", 1000, "--scale", 128),
        *("--block-size", 4, "--num-blocks", 1000, "--max-batched-tokens", 2048),
        *("--json", report_file),
    )
    assert result.exit_code == 0, result.output
    report = json.loads(report_file.read_text())
    assert report["verified"]["outputs"] == 1000
    assert report["verified"]["mismatches"] == 0
    for stage in report["with_caching"]["stages"].values():
        assert stage["hit_tokens"] > 0
        assert stage["prefill_tokens_computed"] > 10 * 1000 * 4


def test_the_engine_hits_what_planning_says(tmp_path: Path) -> None:
    """With blocks for everything, the pipeline hits exactly the blocks of the engine rate."""
    report_file = tmp_path / "report.json"
    result = run_cli(
        *("replay", real_trace(), "--model", "fingerprint", "--limit", 300, "--scale", 128),
        *("--block-size", 4, "--num-blocks", 20_000, "--max-batched-tokens", 1024),
        *("--json", report_file),
    )
    assert result.exit_code == 0, result.output
    plan = plan_trace(real_trace(), PlanOptions(read=ReadOptions(limit=300)))
    for stage in json.loads(report_file.read_text())["with_caching"]["stages"].values():
        assert stage["hit_tokens"] // 4 == plan.rates.engine_hit_tokens // 512


def test_planning_prints_the_published_rates() -> None:
    """The three rates of all 12,031 requests, as a user sees them."""
    result = run_cli("replay", real_trace(), "--model", "none")
    assert result.exit_code == 0, result.output
    rows = table_rows(result.stdout)
    assert rows["requests"][0] == "12,031"
    assert rows["token rate"][0] == "37.36%"
    assert rows["block rate"][0] == "36.64%"
    assert rows["engine rate"][0] == "37.34%"
