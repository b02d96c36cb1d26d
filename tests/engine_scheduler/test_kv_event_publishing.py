"""A scheduler's KV events, published: a consumer knows the pool after every step."""

from collections import Counter

from slotmirror.engine.scheduler import Scheduler
from slotmirror.engine.scheduling.config import SchedulerConfig
from slotmirror.kvcache.event_stream.block_map import BlockMap
from slotmirror.kvcache.event_stream.publisher import KVEventPublisher
from slotmirror.kvcache.event_stream.subscriber import KVEventSubscriber
from slotmirror.kvcache.events import external_block_hash
from slotmirror.kvcache.request import Request, SamplingParams
from support.kv_builders import due_tokens


def make_scheduler(publish, **options):
    config = SchedulerConfig(
        num_blocks=14, block_size=4, max_num_batched_tokens=24, max_model_len=64, **options
    )
    return Scheduler(config, publish_kv_events=publish)


def test_a_consumer_follows_every_step():
    """Shared prefixes, decoded blocks, preemptions and evictions in a small pool."""
    with (
        KVEventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*") as publisher,
        KVEventSubscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber,
    ):
        scheduler = make_scheduler(publisher.publish, enable_kv_cache_events=True)
        requests = {}
        for i in range(12):
            prompt = [*range(8 * (i % 3)), *[50 + i] * 5]
            requests[f"r{i}"] = Request(
                f"r{i}", prompt, sampling_params=SamplingParams(max_tokens=9)
            )
            scheduler.add_request(requests[f"r{i}"])
        known = BlockMap()
        num_preemptions = 0
        while scheduler.has_unfinished_requests():
            output = scheduler.schedule()
            num_preemptions += len(output.preempted_req_ids)
            scheduler.update_from_output(output, due_tokens(output, requests))
            for entry in subscriber.catch_up():
                known.apply(entry.batch.events)
            hashes = filter(None, scheduler.kv_cache_manager.pool.block_hashes)
            assert known.num_blocks == Counter((0, external_block_hash(h, True)) for h in hashes)
    assert num_preemptions > 0


def test_steps_without_events_publish_nothing():
    """Events off, or a step that registers nothing: the callback is not called."""
    batches = []
    for is_on in (False, True):
        scheduler = make_scheduler(batches.append, enable_kv_cache_events=is_on)
        request = Request("r", [1, 2, 3], sampling_params=SamplingParams(max_tokens=2))
        scheduler.add_request(request)
        for _ in range(2):
            output = scheduler.schedule()
            scheduler.update_from_output(output, due_tokens(output, {"r": request}))
    # The first step computes three tokens, the second completes the block of four.
    assert [len(batch) for batch in batches] == [1]
