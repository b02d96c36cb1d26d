"""Turns of a conversation: who waits for whom."""

import pytest

from slotmirror.engine.errors import RequestError
from slotmirror.engine.pipeline_types import PipelineRequest
from slotmirror.engine.turn_order import TurnOrder


def request(req_id: str, after: str | None = None) -> PipelineRequest:
    return PipelineRequest(req_id, [1, 2], after=after)


def test_followers_are_released_by_what_they_wait_for() -> None:
    """First turns start at once; later ones when the one before has left, several if need be."""
    a, b, c, d = request("a"), request("b", "a"), request("c"), request("d", "a")
    order = TurnOrder([a, b, c, d])
    assert order.first() == [a, c]
    assert order.released_by("c") == []
    assert order.released_by("a") == [b, d]


def test_bad_orders_are_refused() -> None:
    """Duplicate ids and `after` ids that do not stand before are errors that name them."""
    with pytest.raises(RequestError, match="'a' is used twice"):
        TurnOrder([request("a"), request("a")])
    with pytest.raises(RequestError, match="'b' comes after 'a', which is not among"):
        TurnOrder([request("b", "a"), request("a")])
