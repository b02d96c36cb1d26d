"""A search split into pieces, among processes and between plain and fault schedules."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context

import torch

from slotmirror.conformance.explorer.search import ExploreReport, Progress, explore

SCHEDULES_PER_PIECE = 200


@dataclass(frozen=True, slots=True)
class _Piece:
    first_seed: int
    schedules: int
    faults: bool


def explore_in_pieces(
    first_seed: int,
    schedules: int,
    *,
    kinds: Sequence[bool],
    processes: int,
    seconds_max: float | None = None,
    progress: Progress = lambda _: None,
) -> ExploreReport:
    """Run the seeds from `first_seed` on, each once; `kinds` says of each piece in turn: faults?

    No piece is begun after `seconds_max`, or once one has found something: its seed, and whether
    it was a fault schedule, are the report's.
    """
    report = ExploreReport(first_seed, faults=any(kinds))
    started = time.monotonic()
    pieces = _pieces(first_seed, schedules, kinds)
    with ProcessPoolExecutor(
        processes, mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        running: set[Future[ExploreReport]] = set()
        while True:
            late = seconds_max is not None and time.monotonic() - started >= seconds_max
            if report.failed_seed is None and not late:
                begun = itertools.islice(pieces, processes - len(running))
                running |= {pool.submit(_explore, piece) for piece in begun}
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for one in done:
                report.add(one.result())
            report.seconds = time.monotonic() - started
            progress(report)
    return report


def _pieces(first_seed: int, schedules: int, kinds: Sequence[bool]) -> Iterator[_Piece]:
    turns = itertools.cycle(kinds)
    for begun in range(0, schedules, SCHEDULES_PER_PIECE):
        count = min(SCHEDULES_PER_PIECE, schedules - begun)
        yield _Piece(first_seed + begun, count, next(turns))


def _explore(piece: _Piece) -> ExploreReport:
    return explore(piece.first_seed, piece.schedules, faults=piece.faults)
