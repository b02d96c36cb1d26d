"""Encoder inputs and the encoder cache by content hash (spec kv 6)."""

import pytest

from slotmirror.engine.scheduling.encoder_cache import EncoderCacheManager
from slotmirror.kvcache.request import MultimodalFeature, Request, SamplingParams
from support.kv_builders import SchedulerRun


def request(req_id, *features, num_tokens=24, first=0, **options):
    return Request(
        req_id,
        range(first, first + num_tokens),
        mm_features=[MultimodalFeature(*feature) for feature in features],
        sampling_params=SamplingParams(max_tokens=3),
        **options,
    )


def test_inputs_are_encoded_when_their_tokens_are_reached():
    """Chunks of 8 tokens: an image is due with the first chunk that overlaps it, and once."""
    run = SchedulerRun(max_num_batched_tokens=8, encoder_budget=8)
    run.add(request("r", ("one", 2, 4), ("two", 10, 8)))
    assert [output.scheduled_encoder_inputs for output in run.steps(3)] == [
        {"r": [0]},
        {"r": [1]},
        {},
    ]


def test_one_image_is_encoded_once():
    """Twice in a prompt, and in another request of the same step: one computation."""
    run = SchedulerRun()
    run.add(
        request("a", ("image", 2, 4), ("image", 10, 4)), request("b", ("image", 3, 4), first=99)
    )
    assert run.step().scheduled_encoder_inputs == {"a": [0]}


def test_outputs_are_kept_across_requests():
    """A later request with the image needs no encoder, whether its prefix hits or not."""
    run = SchedulerRun()
    run.add(request("a", ("image", 2, 4)))
    run.steps(4)
    run.add(request("b", ("image", 3, 4), first=100), request("c", ("image", 2, 4)))
    output = run.step()
    assert output.scheduled_encoder_inputs == {}
    assert [new.num_computed_tokens for new in output.scheduled_new_reqs] == [0, 20]


def test_the_budget_cuts_the_step_before_the_image():
    """Two images of 8 with a budget of 8: the step ends where the second begins."""
    run = SchedulerRun(encoder_budget=8, encoder_cache_size=16)
    run.add(request("r", ("one", 0, 8), ("two", 12, 8)))
    first, second = run.steps(2)
    assert first.num_scheduled_tokens == {"r": 12}
    assert second.num_scheduled_tokens == {"r": 12}
    assert second.scheduled_encoder_inputs == {"r": [1]}


def test_an_image_that_a_hit_cuts_needs_budget_before_any_token():
    """The hit ends inside the image: without budget no token can be scheduled."""
    run = SchedulerRun(encoder_budget=8, encoder_cache_size=8)
    run.add(request("old", ("big", 6, 8)))
    run.steps(4)
    big = MultimodalFeature("big", 6, 8)
    again = Request("again", [*range(8), *range(60, 70)], mm_features=[big])
    run.add(request("other", ("other", 2, 8), first=100), again)
    assert list(run.step().num_scheduled_tokens) == ["other"]
    while again.num_cached_tokens is None:
        output = run.step()
    assert again.num_cached_tokens == 8
    assert output.scheduled_encoder_inputs == {"again": [0]}


def test_images_can_be_kept_whole():
    """With `disable_chunked_mm_input` a chunk ends before an image that it would cut."""
    run = SchedulerRun(max_num_batched_tokens=8, disable_chunked_mm_input=True)
    run.add(request("r", ("image", 5, 6)))
    first, second = run.steps(2)
    assert (first.num_scheduled_tokens, first.scheduled_encoder_inputs) == ({"r": 5}, {})
    assert (second.num_scheduled_tokens, second.scheduled_encoder_inputs) == ({"r": 8}, {"r": [0]})


def test_freed_hashes_are_reported_when_room_is_needed():
    """An unused output stays until another image needs its room, oldest first."""
    run = SchedulerRun(encoder_budget=8, encoder_cache_size=8)
    freed = []
    for i, name in enumerate(("one", "two", "three")):
        run.add(request(name, (name, 0, 4), first=50 * i))
        freed.append(run.step().free_encoder_mm_hashes)
        run.steps(3)
    assert freed == [[], [], ["one"]]


def test_a_refused_admission_keeps_no_output():
    """A request that finds no blocks lets go of the outputs that it would have used."""
    run = SchedulerRun(num_blocks=12, encoder_budget=8, encoder_cache_size=8)
    run.add(request("a", ("one", 0, 8), num_tokens=16))
    run.step()
    run.add(request("b", ("one", 0, 8), num_tokens=40, first=100))
    run.steps(2)
    assert run.scheduler.waiting_req_ids == ["b"]
    run.scheduler.abort_request("b")
    run.step()
    run.add(request("c", ("two", 0, 8), num_tokens=12, first=200))
    assert run.step().free_encoder_mm_hashes == ["one"]


PREEMPTING = {
    "policy": "priority",
    "reserve_full_isl": False,
    "long_prefill_token_threshold": 8,
    "encoder_budget": 16,
    "encoder_cache_size": 16,
}


def test_an_image_of_a_victim_is_not_taken_for_encoded():
    """A request that was to encode an image loses its place in the same step: nobody encodes it,
    so the request that resumes must do it after all."""
    run = SchedulerRun(num_blocks=9, **PREEMPTING)
    run.add(request("victim", ("image", 18, 4), num_tokens=28, priority=9))
    run.step()
    run.add(request("winner", num_tokens=8, first=100, priority=0))
    run.step()
    output = run.step()
    assert output.preempted_req_ids == {"victim"}
    assert output.scheduled_encoder_inputs == {}
    assert {"victim": [0]} in [each.scheduled_encoder_inputs for each in run.steps(8)]


def test_a_request_that_counts_on_a_victims_image_encodes_it():
    """The victim was to encode the image, another request of the step found it in the cache,
    then the victim lost its place: the other one encodes it."""
    run = SchedulerRun(num_blocks=16, **PREEMPTING)
    run.add(request("victim", ("image", 26, 4), num_tokens=36, priority=9))
    run.step()
    run.add(request("heir", ("image", 18, 4), num_tokens=22, first=200, priority=1))
    run.step()
    run.add(request("winner", num_tokens=8, first=100, priority=0))
    run.step()
    output = run.step()
    assert output.preempted_req_ids == {"victim"}
    assert output.num_scheduled_tokens == {"heir": 6, "winner": 1}
    assert output.scheduled_encoder_inputs == {"heir": [0]}


class TestEncoderCache:
    """The bookkeeping alone."""

    def test_capacity_counts_what_can_be_reclaimed(self):
        """Room is there if unused outputs can make it; they go oldest first."""
        cache = EncoderCacheManager(10)
        user = request("r", ("one", 0, 4), ("two", 4, 4), ("three", 8, 8))
        for i in (0, 1):
            assert cache.make_room(4)
            cache.allocate(user, i)
        assert not cache.make_room(8)
        cache.release_all(user)
        assert cache.make_room(8)
        assert cache.take_freed() == ["one", "two"]
        assert not cache.acquire(user, 0)

    def test_outputs_in_use_are_never_dropped(self):
        """Two users: it can be dropped when both let go."""
        cache = EncoderCacheManager(4)
        first, second = request("a", ("one", 0, 4)), request("b", ("one", 0, 4))
        cache.allocate(first, 0)
        assert cache.acquire(second, 0)
        cache.release_all(first)
        assert not cache.make_room(1)
        cache.release_all(second)
        assert cache.make_room(4)

    def test_a_forgotten_output_frees_its_room(self):
        """Whether it has users or not; those no longer hold it."""
        for is_used in (True, False):
            cache = EncoderCacheManager(4)
            user = request("a", ("one", 0, 4))
            cache.allocate(user, 0)
            if not is_used:
                cache.release_all(user)
            cache.forget("one")
            assert cache.inputs_of(user) == {}
            assert not cache.acquire(user, 0)
            assert cache.make_room(4)
            assert cache.take_freed() == []

    def test_reset_forgets_everything(self):
        """After new weights every output must be computed again."""
        run = SchedulerRun(max_num_batched_tokens=4)
        run.add(request("r", ("one", 0, 4)))
        run.step()
        scheduler = run.scheduler
        with pytest.raises(RuntimeError, match="1 running requests may need encoder outputs"):
            scheduler.reset_encoder_cache()
        scheduler.reset_prefix_cache(reset_running_requests=True)
        scheduler.reset_encoder_cache()
        assert scheduler.schedule().scheduled_encoder_inputs == {"r": [0]}
