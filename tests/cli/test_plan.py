"""`slotmirror plan`: the two published figures, and what it refuses."""

import json
from pathlib import Path

import pytest

from support.cli_runs import error_line, run_cli, table_rows


def test_hidden_states_of_the_published_example() -> None:
    """15,092 blocks of 16 rows of 2,048 bf16 are 0.92 GiB."""
    result = run_cli(
        "plan", "--num-blocks", 15092, "--block-size", 16, "--key", "hidden:2048:bfloat16"
    )
    assert result.exit_code == 0
    pool = table_rows(result.stdout)["pool, hidden: (2048) bfloat16"]
    assert pool == ["0.92 GiB", "989.1 MB", "989,069,312"]


def test_codes_of_the_published_example() -> None:
    """16,180 blocks of 16 rows of 16 int64 are 33.1 MB."""
    result = run_cli(
        "plan", "--num-blocks", 16180, "--block-size", 16, "--key", "codes.audio:16:int64"
    )
    assert result.exit_code == 0
    pool = table_rows(result.stdout)["pool, codes.audio: (16) int64"]
    assert pool == ["0.03 GiB", "33.1 MB", "33,136,640"]


def test_keys_and_staging_pages_add_up() -> None:
    """All keys' pools and pages are in the total; a row may have several dimensions.

    Pools: 10 · 4 rows of 2 · 3 · 4 and of 5 · 2 bytes; pages: 2 · 8 rows of the same.
    """
    result = run_cli(
        *("plan", "--num-blocks", 10, "--block-size", 4),
        *("--key", "a:2x3:float32", "--key", "b:c:5:float16"),
        *("--staging-depth", 2, "--staging-capacity-tokens", 8),
    )
    assert result.exit_code == 0
    totals = {
        name: int(cells[-1].replace(",", "")) for name, cells in table_rows(result.stdout).items()
    }
    assert totals["pool, a: (2, 3) float32"] == 40 * 24
    assert totals["staging, b:c: (5) float16"] == 16 * 10
    assert totals["pools"] == 40 * 34
    assert totals["staging pages"] == 16 * 34
    assert totals["in all"] == 56 * 34


FORM = "must be NAME:WIDTH:DTYPE, such as hidden:2048:bfloat16 or codes:4x16:int64"


@pytest.mark.parametrize(
    ("key", "rule"),
    [
        ("hidden", FORM),
        (":2048:bfloat16", FORM),
        ("hidden:0:bfloat16", FORM),
        ("hidden:-1:bfloat16", FORM),
        ("hidden::bfloat16", FORM),
        ("hidden:2x:bfloat16", FORM),
        ("hidden:²:bfloat16", FORM),
        ("hidden:2048:bf16", "torch has no dtype 'bf16'"),
        ("hidden:2048:nn", "torch has no dtype 'nn'"),
    ],
)
def test_a_key_of_another_form_is_refused(key: str, rule: str) -> None:
    """The error shows the key and the form that it should have."""
    result = run_cli("plan", "--num-blocks", 1, "--block-size", 1, "--key", key)
    assert result.exit_code == 2
    assert error_line(result) == f"error: key={key!r}: {rule}"


def test_a_setting_out_of_range_is_refused() -> None:
    """The error of the configuration is shown as it is."""
    result = run_cli("plan", "--num-blocks", 0, "--block-size", 1, "--key", "a:1:int8")
    assert result.exit_code == 2
    assert error_line(result) == "error: num_blocks=0: must be at least 1"


def test_the_report_for_machines(tmp_path: Path) -> None:
    """The same figures as plain values."""
    report = tmp_path / "plan.json"
    result = run_cli(
        *("plan", "--num-blocks", 15092, "--block-size", 16, "--key", "hidden:2048:bfloat16"),
        *("--json", report),
    )
    assert result.exit_code == 0
    staging_bytes = 4 * 1024 * 4096
    assert json.loads(report.read_text()) == {
        "num_blocks": 15092,
        "block_size": 16,
        "keys": [
            {
                "name": "hidden",
                "row_bytes": 4096,
                "pool_bytes": 989_069_312,
                "staging_bytes": staging_bytes,
            }
        ],
        "pool_bytes": 989_069_312,
        "staging_bytes": staging_bytes,
        "bounce_bytes": 0,
        "host_bytes": 989_069_312 + staging_bytes,
    }


@pytest.mark.parametrize("missing", ["num_blocks", "block_size", "key"])
def test_a_cache_needs_all_three(missing: str) -> None:
    """The error names what is missing, and the other way to give it."""
    given = {"num_blocks": 1, "block_size": 1, "key": "a:1:int8"}
    del given[missing]
    options = [
        part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)
    ]
    result = run_cli("plan", *options)
    assert result.exit_code == 2
    assert error_line(result) == (
        f"error: {missing}=None: must be given, or all stages with --stages"
    )
