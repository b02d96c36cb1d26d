"""vLLM's scheduler output → step events (K3), over fakes with the real field names."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slotmirror.adapters.vllm.request_ids import is_request_of
from slotmirror.adapters.vllm.scheduler_events import (
    SchedulerTranslator,
    accepted_positions,
    num_prompt_tokens,
)
from slotmirror.core.errors import PrefixCacheUnmatchError, UnknownRequestError
from support.vllm_fakes import NewRequest, SchedulerOutput, cached, new


@pytest.fixture
def translator():
    return SchedulerTranslator(num_blocks=16, block_size=4)


def test_new_and_running_requests(translator):
    """A new request sets its table, a running one appends; slots follow position by position."""
    events = translator.translate(
        SchedulerOutput({"a": 3, "b": 2}, [new("a", [5, 9], 7, computed=4), new("b", [2], 2)]), {}
    )
    assert events.req_ids == ("a", "b")
    assert [request.num_computed_tokens for request in events.new] == [4, 0]
    np.testing.assert_array_equal(events.slots, [36, 37, 38, 8, 9])
    running = SchedulerOutput(
        {"b": 1, "a": 2}, scheduled_cached_reqs=cached(a=(7, [11]), b=(2, None))
    )
    events = translator.translate(running, {})
    np.testing.assert_array_equal(events.slots, [10, 39, 44])
    np.testing.assert_array_equal(events.first_positions, [2, 7])


def test_batch_order_is_that_of_the_scheduled_tokens(translator):
    """The order of `num_scheduled_tokens` rules, wherever the requests are described."""
    events = translator.translate(
        SchedulerOutput({"b": 1, "a": 1}, [new("a", [1], 1), new("b", [2], 1)]), {}
    )
    assert events.req_ids == ("b", "a")
    np.testing.assert_array_equal(events.slots, [8, 4])


def test_resumed_by_the_first_route(translator):
    """V1: a cached request among the resumed ones has its table replaced, not appended to."""
    translator.translate(SchedulerOutput({"a": 5}, [new("a", [1, 2], 5)]), {})
    gone = translator.translate(SchedulerOutput({}, preempted_req_ids={"a"}), {})
    assert gone.preempted == ("a",)
    back = cached(a=(4, [7, 3]))
    back.resumed_req_ids = {"a"}
    events = translator.translate(SchedulerOutput({"a": 2}, scheduled_cached_reqs=back), {})
    assert events.new == ()
    assert events.resumed[0].block_ids == [7, 3]
    np.testing.assert_array_equal(events.slots, [12, 13])


def test_resumed_by_the_second_route(translator):
    """V2: a preempted request comes back as a new one; its id and table say the rest."""
    translator.translate(SchedulerOutput({"a": 5}, [new("a", [1, 2], 5)]), {})
    translator.translate(SchedulerOutput({}, preempted_req_ids={"a"}), {})
    events = translator.translate(SchedulerOutput({"a": 1}, [new("a", [7, 3], 5, computed=4)]), {})
    assert (events.resumed, events.new[0].req_id) == ((), "a")
    np.testing.assert_array_equal(events.slots, [12])


def test_finished_requests_may_hand_their_blocks_on_in_the_same_output(translator):
    """The end of a request comes with the step that gives its blocks to another."""
    translator.translate(SchedulerOutput({"a": 4}, [new("a", [1], 4)]), {})
    events = translator.translate(
        SchedulerOutput({"b": 4}, [new("b", [1], 4)], finished_req_ids={"a"}), {}
    )
    assert events.ended == ("a",)
    with pytest.raises(UnknownRequestError, match="'a'"):
        translator.translate(
            SchedulerOutput({"a": 1}, scheduled_cached_reqs=cached(a=(4, None))), {}
        )


def test_a_step_that_copies_kv_blocks_is_refused(translator):
    """Only the step shows it (G4); the setting to change is named."""
    with pytest.raises(PrefixCacheUnmatchError, match="prefix_match_unit"):
        translator.translate(SchedulerOutput(kv_cache_block_copies=[object()]), {})


@pytest.mark.parametrize(("num_sampled", "position"), [(1, 8), (2, 9), (4, 11), (0, 8)])
def test_accepted_positions(translator, num_sampled, position):
    """Of a token and three drafts from position 7, `num_sampled - 1` drafts were accepted."""
    translator.translate(SchedulerOutput({"a": 7}, [new("a", [1, 2, 3], 7)]), {})
    output = SchedulerOutput(
        {"a": 4},
        scheduled_cached_reqs=cached(a=(7, None)),
        scheduled_spec_decode_tokens={"a": [4, 5, 6], "b": []},
    )
    events = translator.translate(output, {})
    assert events.drafted == ("a",)
    sampled = {"a": [1] * num_sampled}
    assert accepted_positions(events, output, sampled) == {"a": position}


def test_prompt_lengths():
    """From token ids, or from embeddings where there are none."""
    assert num_prompt_tokens(new("a", [1], 3)) == 3
    embedded = NewRequest("a", None, ([1],), prompt_embeds=torch.zeros(5, 2))
    assert num_prompt_tokens(embedded) == 5


def test_request_ids():
    """Suffix and sample number belong to the engine; another request's digits do not."""
    assert is_request_of("7-994c9113", "7")
    assert is_request_of("2_7-994c9113", "7")
    assert is_request_of("mine", "mine")
    assert not is_request_of("17-994c9113", "7")
    assert not is_request_of("7-x94c9113", "7")
