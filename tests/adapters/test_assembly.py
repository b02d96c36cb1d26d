"""Steps' rows → whole requests, by position."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from slotmirror.adapters.delivery.assembly import RequestAssembler


def outputs(hidden=None, key_spans=None, **keys):
    """Step outputs; `hidden` and each key map a request to (first, end) or a payload."""
    spans = dict(hidden or {})

    def rows(by_request):
        return {
            r: torch.arange(span[0], span[1]).reshape(-1, 1).float()
            if isinstance(span, tuple)
            else span
            for r, span in by_request.items()
        }

    return SimpleNamespace(
        hidden_states=rows(hidden) if hidden is not None else None,
        mm_outputs={key: rows(by_request) for key, by_request in keys.items()},
        spans=spans,
        key_spans=key_spans or {},
    )


def positions(request, key="hidden_states"):
    return request.rows[key].flatten().tolist()


def test_a_prompt_is_handed_out_as_soon_as_it_is_whole():
    """Chunk by chunk; rows of the answer are cut off, and nothing more is wanted."""
    assembler = RequestAssembler(prompt_only=True)
    assembler.begin("a", 6)
    assert assembler.add(outputs({"a": (0, 4)})) == []
    [whole] = assembler.add(outputs({"a": (4, 8)}))
    assert positions(whole) == [0, 1, 2, 3, 4, 5]
    assert assembler.wants(["a"]) == []


def test_everything_is_handed_out_at_the_end():
    """Every computed position, also of a request whose prompt was whole long before."""
    assembler = RequestAssembler(prompt_only=False)
    assembler.begin("a", 2)
    for first in range(40):
        assert assembler.add(outputs({"a": (first, first + 1)})) == []
    [whole] = assembler.end(["a", "stranger"])
    assert positions(whole) == list(range(40))


def test_positions_that_come_again_replace_the_former_rows():
    """A replay without a cache, from the middle and from before."""
    assembler = RequestAssembler(prompt_only=False)
    assembler.begin("a", 2)
    assembler.add(outputs({"a": (0, 5)}))
    again = outputs({"a": (2, 6)})
    again.hidden_states["a"] += 100
    assembler.add(again)
    [whole] = assembler.end_all()
    assert positions(whole) == [0, 1, 102, 103, 104, 105]


def test_accepted_ends_cut_drafts():
    """Rows past the accepted position are not taken."""
    assembler = RequestAssembler(prompt_only=False)
    assembler.begin("a", 2)
    assembler.add(outputs({"a": (0, 5)}), {"a": 3})
    [whole] = assembler.end_all()
    assert positions(whole) == [0, 1, 2]


@pytest.mark.parametrize("prompt_only", [True, False])
def test_a_gap_is_never_handed_out(prompt_only):
    """The request is incomplete, whatever comes later."""
    assembler = RequestAssembler(prompt_only=prompt_only)
    assembler.begin("a", 6)
    assembler.add(outputs({"a": (0, 2)}))
    assert assembler.add(outputs({"a": (3, 6)})) == []
    assert assembler.wants(["a"]) == []
    assert assembler.end(["a"]) == []
    assert assembler.requests_incomplete == 1


def test_a_request_that_does_not_begin_at_its_first_token_is_incomplete():
    """Rows from position 2 on are not a prompt."""
    assembler = RequestAssembler(prompt_only=True)
    assembler.begin("a", 6)
    assert assembler.add(outputs({"a": (2, 6)})) == []
    assert assembler.end(["a"]) == []


def test_keys_that_come_later_say_where_they_begin():
    """A key of the hit alone has its own span; a leftover is not rows."""
    assembler = RequestAssembler(prompt_only=False)
    assembler.begin("a", 4)
    assembler.add(outputs({"a": (0, 4)}, extra={"a": "leftover"}))
    assembler.add(
        outputs({"a": (4, 6)}, {"codes": {"a": (4, 5)}}, codes={"a": (4, 5)}, other={"a": (4, 6)})
    )
    [whole] = assembler.end_all()
    assert (positions(whole, "codes"), whole.first_positions["codes"]) == ([4], 4)
    assert positions(whole, "other") == [4, 5]
    assert "extra" not in whole.rows


def test_an_id_that_begins_again_starts_from_nothing():
    """The former request of that id is counted as incomplete."""
    assembler = RequestAssembler(prompt_only=True)
    assembler.begin("a", 4)
    assembler.add(outputs({"a": (0, 2)}))
    assembler.begin("a", 1)
    [whole] = assembler.add(outputs({"a": (0, 1)}))
    assert (positions(whole), assembler.requests_incomplete) == ([0], 1)
