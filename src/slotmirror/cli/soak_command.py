"""`slotmirror soak`: real threads, small pools, every delivered row compared, memory watched."""

import random
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from slotmirror.cli.bad_input import bad_input_exits
from slotmirror.cli.consoles import output_console
from slotmirror.cli.json_report import check_json_file, write_json
from slotmirror.cli.units import count, mb
from slotmirror.cli.units import seconds as duration
from slotmirror.conformance.soak.samples import SAMPLES_MIN, Sample
from slotmirror.conformance.soak.soak import BUILDERS, SoakReport
from slotmirror.conformance.soak.soak import soak as run_soak
from slotmirror.core.registry import load_backend

EXIT_WRONG = 1
_FRESH_SEED_MAX = 1 << 40


def soak(
    seconds: Annotated[float, typer.Option(min=0.0, help="How long.")] = 600.0,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many rounds of steps.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of the first cache; a fresh one if not given.")
    ] = None,
    backend: Annotated[str, typer.Option(help="Device backend.")] = "cpu_ref",
    builders: Annotated[int, typer.Option(min=1, help="Builder threads.")] = BUILDERS,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the report here too.")
    ] = None,
) -> None:
    """Soak caches on real threads, one after the other.

    Ends with exit code 1 if a row is wrong, a legal call fails, or memory, objects or threads are
    not flat. A seed names the caches and what their engines do, not what the threads do.
    """
    console = output_console()
    with bad_input_exits():
        check_json_file(json_file)
        device = load_backend(backend)
    seed = random.SystemRandom().randrange(_FRESH_SEED_MAX) if seed is None else seed
    console.print(f"seed {seed}")
    report = run_soak(
        device,
        seed,
        seconds=seconds,
        rounds_max=rounds,
        builders=builders,
        progress=lambda so_far: console.print(_line(so_far), markup=False),
    )
    with bad_input_exits():
        write_json(json_file, _json(report))
    _show(console, report)
    if report.faults():
        raise typer.Exit(EXIT_WRONG)


def _line(report: SoakReport) -> str:
    last = report.samples[-1]
    return (
        f"{duration(report.seconds)}: {count(report.rounds)} rounds, "
        f"{count(report.counts['rows'])} rows, {mb(last.resident_bytes)} resident, "
        f"{last.threads} threads"
    )


def _show(console: Console, report: SoakReport) -> None:
    happened = Table("what happened", "times")
    rows = {
        "caches": report.caches,
        "rounds": report.rounds,
        **dict(sorted(report.counts.items())),
    }
    for name, number in rows.items():
        happened.add_row(name, count(number))
    console.print(happened)
    if report.samples:
        console.print(_at_rest(report.samples))
    faults = report.faults()
    for fault in faults:
        console.print(fault, markup=False, style="red")
    if faults:
        console.print(f"again: slotmirror soak --backend {report.backend} --seed {report.seed}")
    elif report.flatness is None:
        console.print(f"right; flatness takes {SAMPLES_MIN} rounds", style="green")
    else:
        console.print(_flat(report), style="green", markup=False)


def _flat(report: SoakReport) -> str:
    flat = report.flatness
    assert flat is not None
    return (
        f"right and flat: in the last half {flat.resident_growth_bytes / 1024:+,.0f} KiB resident, "
        f"{flat.objects_per_round:+.2f} objects per round, "
        f"{flat.objects_per_cache:+.2f} per ended cache"
    )


def _at_rest(samples: list[Sample]) -> Table:
    table = Table("at rest", "first", "middle", "last")
    looks = (samples[0], samples[len(samples) // 2], samples[-1])
    table.add_row("seconds", *(duration(one.seconds) for one in looks))
    table.add_row("resident", *(mb(one.resident_bytes) for one in looks))
    table.add_row("Python objects", *(count(one.objects) for one in looks))
    table.add_row("threads", *(str(one.threads) for one in looks))
    table.add_row("pages held", *(str(one.pages_held) for one in looks))
    table.add_row("bytes of steps", *(count(one.held_bytes) for one in looks))
    return table


def _json(report: SoakReport) -> dict[str, object]:
    return {
        "seed": report.seed,
        "backend": report.backend,
        "caches": report.caches,
        "rounds": report.rounds,
        "seconds": round(report.seconds, 3),
        "counts": dict(sorted(report.counts.items())),
        "samples": [asdict(one) for one in report.samples],
        "flatness": None if report.flatness is None else asdict(report.flatness),
        "faults": report.faults(),
    }
