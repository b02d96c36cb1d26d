"""`slotmirror replay --model none` at several pool sizes: table, JSON and picture."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from support.cli_runs import error_line, run_cli, table_rows
from support.trace_files import block_request, write_json_lines

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Four prompts of two blocks, in turn: a pool of 9 keeps all, one of 5 keeps none in time."""
    records = [block_request(1025, 1, [i % 4, 10 + i % 4, 20 + i % 4]) for i in range(12)]
    return write_json_lines(tmp_path / "a&b.jsonl", records)


def test_the_rate_grows_with_the_pool(trace: Path, tmp_path: Path) -> None:
    """One row per size in the table, one entry in the report, in one run."""
    result = run_cli(
        *("replay", trace, "--model", "none", "--num-blocks", 20, "--num-blocks", 5),
        *("--json", tmp_path / "plan.json"),
    )
    assert result.exit_code == 0, result.output
    rows = table_rows(result.stdout)
    most = 8 * 1024 / (12 * 1025)
    assert rows["5"][1:3] == ["0.00%", "0.00%"]
    assert rows["20"][1:3] == [f"{most:.2%}", "100.00%"]
    pools = json.loads((tmp_path / "plan.json").read_text())["pools"]
    assert [(pool["num_blocks"], pool["hit_rate"]) for pool in pools] == [(20, most), (5, 0.0)]


def test_the_curve_is_a_picture_of_the_table(trace: Path, tmp_path: Path) -> None:
    """Without sizes round ones are chosen; every pool is a point, left to right and upwards."""
    picture = tmp_path / "curve.svg"
    result = run_cli("replay", trace, "--model", "none", "--capacity-curve", picture)
    assert result.exit_code == 0, result.output
    root = ElementTree.fromstring(picture.read_text())
    dots = list(root.iter(f"{SVG}circle"))
    titles = [dot.findtext(f"{SVG}title") for dot in dots]
    rows = table_rows(result.stdout)
    assert titles == [f"{size} blocks: {rows[size][1]}" for size in ("2", "5", "10")]
    across, down = ([float(dot.attrib[axis]) for dot in dots] for axis in ("cx", "cy"))
    assert across == sorted(set(across))
    assert down == sorted(down, reverse=True)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert "a&b.jsonl: hit rate against capacity" in texts


def test_one_pool_is_a_picture_too(trace: Path, tmp_path: Path) -> None:
    """A single point lies in the middle."""
    picture = tmp_path / "curve.svg"
    arguments = ("--model", "none", "--num-blocks", 9, "--capacity-curve", picture)
    assert run_cli("replay", trace, *arguments).exit_code == 0
    (dot,) = ElementTree.fromstring(picture.read_text()).iter(f"{SVG}circle")
    assert float(dot.attrib["cx"]) == 380.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--num-blocks", 5, "--num-blocks", 6), "num_blocks=[5, 6]: several pools need"),
        (("--capacity-curve", "curve.svg"), "capacity_curve='curve.svg': needs --model none"),
        (
            ("--model", "none", "--capacity-curve", "none/curve.svg"),
            "capacity_curve='none/curve.svg': cannot be written: no such folder",
        ),
        (("--model", "none", "--num-blocks", 1), "num_blocks=1: must be at least 2"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    trace: Path, options: tuple[object, ...], message: str
) -> None:
    """Exit code 2 and one line naming the setting."""
    result = run_cli("replay", trace, *options)
    assert result.exit_code == 2
    assert message in error_line(result)
