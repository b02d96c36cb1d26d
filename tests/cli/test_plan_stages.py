"""`slotmirror plan --stages`: a pipeline's memory on a node, the verdicts, and what it refuses."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from slotmirror.cli import plan_command
from slotmirror.engine.node_memory import memlock_limit, memory_limits
from support.cli_runs import error_line, run_cli, table_rows
from support.kernel_files import plant_kernel_files

MIB = 1 << 20

THINKER = """
[[stage]]
name = "thinker"
num_blocks = 1024
block_size = 16
staging_depth = 2
staging_capacity_tokens = 768
hit_buffer_bytes_max = 5242880
keys = ["hidden:2048:bfloat16"]
"""
"""A pool of 64 MiB; two pages of 3 MiB, which torch's allocator rounds up to 4 MiB each."""

TALKER = """
[[stage]]
name = "talker"
processes = 2
num_blocks = 256
block_size = 16
staging_depth = 1
copy_chunk_bytes = 1048576
keys = ["hidden:512:float32", "codes:1024:int8"]
deferred_keys = ["codes"]
"""
"""Pools of 8 and 4 MiB, pages of 2 and 1 MiB, two bounce buffers of 1 MiB; two processes."""

THINKER_BYTES = (64 + 2 * 4 + 5) * MIB
TALKER_BYTES = (8 + 4 + 2 + 1 + 2) * MIB
REPLICA_BYTES = THINKER_BYTES + 2 * TALKER_BYTES
ENOUGH = ("--memory-limit", "1g", "--memlock-limit", "unlimited")


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """Both stages, as a file."""
    return written(tmp_path, THINKER + TALKER)


def written(folder: Path, text: str) -> Path:
    file = folder / "pipeline.toml"
    file.write_text(text, encoding="utf-8")
    return file


def verdicts(stdout: str) -> list[str]:
    return [line for line in stdout.splitlines() if line.startswith(("fits:", "does not fit:"))]


def test_stages_processes_and_replicas_add_up(pipeline: Path, tmp_path: Path) -> None:
    """Every class of every process is in the node's sum, the allocator's rounding included."""
    report = tmp_path / "plan.json"
    result = run_cli("plan", "--stages", pipeline, "--replicas", 3, *ENOUGH, "--json", report)
    assert result.exit_code == 0
    plan = json.loads(report.read_text())
    thinker, talker = plan["stages"]
    assert thinker["rounding_bytes"] == 2 * MIB
    assert thinker["host_bytes"] == THINKER_BYTES
    assert thinker["pinned_bytes"] == 8 * MIB
    assert (talker["processes"], talker["bounce_bytes"]) == (2, 2 * MIB)
    assert talker["host_bytes"] == TALKER_BYTES
    assert plan["host_bytes"] == 3 * REPLICA_BYTES
    assert plan["pinned_bytes"] == 3 * (8 + 2 * 5) * MIB
    assert plan["fits"] is True


def test_the_table_has_a_row_per_stage_and_one_for_the_node(pipeline: Path) -> None:
    """Stages show one process, the last row all of them; hit outputs without bound are named."""
    result = run_cli("plan", "--stages", pipeline, "--replicas", 2, *ENOUGH)
    rows = table_rows(result.stdout)
    assert rows["thinker"] == [
        *("2", "64.00 MiB", "6.00 MiB", "0 B", "5.00 MiB", "2.00 MiB", "77.00 MiB", "8.00 MiB")
    ]
    assert rows["node"][0] == "6"
    assert rows["node"][-2:] == ["222.00 MiB", "36.00 MiB"]
    assert "hit outputs of 'talker' are not counted: hit_buffer_bytes_max sets no bound" in (
        result.stdout
    )
    assert "hit outputs of 'thinker'" not in result.stdout


def test_what_fits_says_what_is_left(pipeline: Path) -> None:
    """Exit code 0; a limit that is exactly met fits."""
    result = run_cli("plan", "--stages", pipeline, *ENOUGH[2:], "--memory-limit", REPLICA_BYTES)
    assert result.exit_code == 0
    assert verdicts(result.stdout) == [
        "fits: host memory of the node 111.00 MiB; memory 111.00 MiB (--memory-limit); 0 B left",
        "fits: page-locked by a process of 'thinker' 8.00 MiB; memlock unlimited (--memlock-limit)",
    ]


@pytest.mark.parametrize(
    ("replicas", "limit", "remedy"),
    [
        (1, REPLICA_BYTES - 1, "not even one replica fits, lower num_blocks"),
        (5, "300m", "lower replicas to 2, lower num_blocks"),
    ],
)
def test_too_little_memory_does_not_fit(
    pipeline: Path, replicas: int, limit: object, remedy: str
) -> None:
    """Exit code 1, and the line names the figures and what to change."""
    result = run_cli(
        *("plan", "--stages", pipeline, "--replicas", replicas),
        *("--memory-limit", limit, "--memlock-limit", "unlimited"),
    )
    assert result.exit_code == 1
    [memory, _] = verdicts(result.stdout)
    assert memory.startswith("does not fit: host memory of the node ")
    assert memory.endswith(f"(--memory-limit); {remedy}, or take a node with more memory")


def test_memlock_bounds_each_process_alone(pipeline: Path) -> None:
    """The limit is a process's own: the largest counts, however many there are."""
    command = ("plan", "--stages", pipeline, "--replicas", 5, "--memory-limit", "1g")
    assert run_cli(*command, "--memlock-limit", "8m").exit_code == 0
    result = run_cli(*command, "--memlock-limit", 8 * MIB - 1)
    assert result.exit_code == 1
    [_, memlock] = verdicts(result.stdout)
    assert memlock.startswith("does not fit: page-locked by a process of 'thinker' 8.00 MiB; ")
    assert memlock.endswith("or lower staging_depth or staging_capacity_tokens")


def test_a_pinned_pool_counts_against_memlock(tmp_path: Path) -> None:
    """`pin_pool` and `pin_outputs` page-lock more than pages; the remedy is to unset it."""
    file = written(tmp_path, THINKER + "pin_pool = true\npin_outputs = true\n")
    result = run_cli(
        "plan", "--stages", file, "--memory-limit", "1g", "--memlock-limit", (64 + 8 + 5) * MIB - 1
    )
    [_, memlock] = verdicts(result.stdout)
    assert memlock.startswith("does not fit: page-locked by a process of 'thinker' 77.00 MiB; ")
    assert memlock.endswith("or unset pin_pool")


def test_this_machines_limits_are_read(
    pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the two options: physical memory, cgroup, and memlock, soft below hard."""
    root = plant_kernel_files(
        tmp_path / "root", memory_kib=1 << 20, memlock=("65536", "unlimited"), v2={"": 100 * MIB}
    )
    monkeypatch.setattr(plan_command, "memory_limits", partial(memory_limits, root=root))
    monkeypatch.setattr(plan_command, "memlock_limit", partial(memlock_limit, root=root))
    result = run_cli("plan", "--stages", pipeline)
    assert result.exit_code == 1
    need = "host memory of the node 111.00 MiB"
    assert verdicts(result.stdout) == [
        f"fits: {need}; physical memory 1.00 GiB ({root}/proc/meminfo); 913.00 MiB left",
        (
            f"does not fit: {need}; cgroup memory 100.00 MiB ({root}/sys/fs/cgroup/memory.max); "
            "not even one replica fits, lower num_blocks, or raise the container's limit"
        ),
        (
            "does not fit: page-locked by a process of 'thinker' 8.00 MiB; memlock 64.00 KiB "
            "(ulimit -l; hard limit: unlimited); run `ulimit -l 8192` before the start: the hard "
            "limit allows it"
        ),
    ]


def test_a_tiny_pipeline_fits_this_machine(tmp_path: Path) -> None:
    """The real files of the kernel under this test are understood."""
    file = written(
        tmp_path,
        '[[stage]]\nname = "s"\nnum_blocks = 1\nblock_size = 1\nkeys = ["a:1:int8"]\n'
        "staging_depth = 1\nstaging_capacity_tokens = 1\n",
    )
    result = run_cli("plan", "--stages", file)
    assert result.exit_code == 0, result.output
    assert len(verdicts(result.stdout)) == 3


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ('name = "thinker"\n', "", "stage 1: name=None: is missing"),
        ("num_blocks = 1024\n", "", "stage 'thinker': num_blocks=None: is missing"),
        ("1024", "0", "stage 'thinker': num_blocks=0: must be at least 1"),
        ("1024", '"many"', "stage 'thinker': num_blocks='many': must be a whole number"),
        ("1024", "1024\nprocesses = 0", "stage 'thinker': processes=0: must be a whole number"),
        ("num_blocks", "blocks", "stage 'thinker': blocks=1024: unknown in stage; known: name, "),
        ("[[stage]]", "[[stages]]", "stages=[{'name': 'thinker'"),
        ("[[stage]]", "[stage]", "must have a [[stage]] table for each stage"),
        ("[[stage]]", "[[stage", "is no TOML file: "),
        ("hidden:2048:bfloat16", "hidden:2048", "stage 'thinker': key='hidden:2048': must be NAME"),
        ('["hidden:2048:bfloat16"]', "[]", "stage 'thinker': keys=[]: must name at least one"),
        ('["hidden:2048:bfloat16"]', "7", "stage 'thinker': keys=7: must be a list of texts"),
        (
            '"hidden:2048:bfloat16"',
            '"hidden:1:int8", "hidden:2:int8"',
            "stage 'thinker': keys=['hidden']: given twice",
        ),
        (
            "keys = ",
            'deferred_keys = ["codes"]\nkeys = ',
            "stage 'thinker': deferred_keys=['codes']: is none of the keys ['hidden']",
        ),
    ],
)
def test_a_wrong_stage_file_is_refused(tmp_path: Path, old: str, new: str, error: str) -> None:
    """One line that names stage, setting and value; exit code 2, and nothing is printed."""
    assert old in THINKER
    result = run_cli("plan", "--stages", written(tmp_path, THINKER.replace(old, new)), *ENOUGH)
    assert result.exit_code == 2
    assert error in error_line(result)


def test_two_stages_of_one_name_are_refused(tmp_path: Path) -> None:
    """The error names the name."""
    result = run_cli("plan", "--stages", written(tmp_path, THINKER * 2), *ENOUGH)
    assert result.exit_code == 2
    assert error_line(result) == "error: name=['thinker']: given twice"


def test_a_pipeline_without_stages_is_refused(tmp_path: Path) -> None:
    """Nothing to plan is an error, not a plan that fits."""
    result = run_cli("plan", "--stages", written(tmp_path, "stage = []"), *ENOUGH)
    assert result.exit_code == 2
    assert error_line(result) == "error: stages=[]: must be at least one"


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    """The error names the file."""
    result = run_cli("plan", "--stages", tmp_path / "none.toml")
    assert result.exit_code == 2
    assert error_line(result).endswith("none.toml': cannot be read: No such file or directory")


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("--replicas", 0, "replicas=0: must be at least 1"),
        ("--memory-limit", "256GB", "memory_limit='256GB': must be a whole number of bytes or of"),
        ("--memory-limit", "0", "memory_limit='0': must be a whole number of bytes or of binary"),
        ("--memory-limit", "unlimited", "memory_limit='unlimited': must be a whole number"),
        ("--memlock-limit", "-1", "memlock_limit='-1': must be a whole number of bytes or"),
        ("--num-blocks", 5, "num_blocks=5: belongs into the file that --stages names"),
        ("--key", "a:1:int8", "key=['a:1:int8']: belongs into the file that --stages names"),
    ],
)
def test_an_option_that_cannot_be_is_refused(
    pipeline: Path, option: str, value: object, error: str
) -> None:
    """The error names option and value."""
    result = run_cli("plan", "--stages", pipeline, *ENOUGH, option, value)
    assert result.exit_code == 2
    assert error_line(result).startswith(f"error: {error}")


@pytest.mark.parametrize("option", ["--replicas", "--memory-limit", "--memlock-limit"])
def test_options_of_a_node_need_stages(option: str) -> None:
    """A single cache is planned without a node; the option is refused, not ignored."""
    result = run_cli("plan", "--num-blocks", 1, "--block-size", 1, "--key", "a:1:int8", option, "1")
    assert result.exit_code == 2
    assert "is for the node that --stages describes" in error_line(result)
