"""Rows collected by position: pieces, gaps, doubles."""

import pytest
import torch

from slotmirror.engine.errors import EngineError
from slotmirror.engine.stage_output import RowCollector


def rows(*values: int) -> torch.Tensor:
    return torch.tensor([[value, value] for value in values])


def test_pieces_make_one_tensor() -> None:
    """Spans in any sizes end up at their positions, copied out of the buffers they came in."""
    collector = RowCollector("r", 5)
    piece = rows(0, 1)
    collector.add("k", 0, 2, piece)
    piece.zero_()
    collector.add("k", 2, 2, rows()[:0].reshape(0, 2))
    collector.add("k", 2, 5, rows(2, 3, 4))
    output = collector.finish((7, 7, 7), (8, 8, 8))
    assert output.num_rows == 5
    assert output.complete_rows("k", 5).equal(rows(0, 1, 2, 3, 4))
    assert output.complete_rows("k", 2).equal(rows(0, 1))


def test_gap_and_double_delivery_are_counted_and_refused() -> None:
    """A missing or repeated position is counted, and the complete rows refuse to be complete."""
    collector = RowCollector("r", 4)
    collector.add("k", 0, 2, rows(0, 1))
    collector.add("k", 1, 3, rows(1, 2))
    output = collector.finish((7,), (8, 8, 8, 8))
    assert output.deliveries["k"].tolist() == [1, 2, 1, 0]
    assert output.complete_rows("k", 1).equal(rows(0))
    with pytest.raises(EngineError, match=r"position 1 of 'k' was delivered 2 times \(2 of 4"):
        output.complete_rows("k", 4)
    with pytest.raises(EngineError, match="no row of 'other' was delivered"):
        output.complete_rows("other", 1)


@pytest.mark.parametrize(("first", "end"), [(3, 5), (-1, 1), (0, 1)])
def test_rows_outside_the_request_are_refused(first: int, end: int) -> None:
    """Positions behind the last, before the first, or not as many as rows raise by name."""
    collector = RowCollector("r", 4)
    with pytest.raises(
        EngineError, match=f"2 rows of 'k' delivered for positions {first} to {end}"
    ):
        collector.add("k", first, end, rows(0, 1))
    assert collector.rows == {}
