"""The publisher and its subscriber over real sockets: order, replay, loss, and the block map.

Nothing here sleeps: a receiver polls with a timeout, and a lost batch is one that is never taken
off the subscriber's socket.
"""

import sys
from collections import Counter
from contextlib import contextmanager

import pytest
import zmq

from slotmirror.kvcache.event_stream.block_map import BlockMap
from slotmirror.kvcache.event_stream.publisher import END_OF_REPLAY, KVEventPublisher
from slotmirror.kvcache.event_stream.subscriber import EventsLostError, KVEventSubscriber
from slotmirror.kvcache.event_stream.wire import KVEventBatch, decode_batch, encode_batch
from slotmirror.kvcache.events import BlockRemoved, BlockStored, KVEventLog
from support.kv_builders import admit, decode, make_manager, make_request

TIMEOUT_S = 20.0
LIVE, REPLAY = "inproc://live", "inproc://replay"


@pytest.fixture
def context():
    with zmq.Context() as shared:
        yield shared


@contextmanager
def both_ends(context, **options):
    """A publisher with these options and its subscriber."""
    with (
        KVEventPublisher(LIVE, REPLAY, context=context, **options) as publisher,
        KVEventSubscriber(LIVE, REPLAY, topic=options.get("topic", ""), context=context) as ours,
    ):
        yield publisher, ours


@pytest.fixture
def publisher(context):
    with KVEventPublisher(LIVE, REPLAY, topic="kv", clock=lambda: 1.5, context=context) as made:
        yield made


@pytest.fixture
def subscriber(context, publisher):
    with KVEventSubscriber(LIVE, REPLAY, topic="kv", context=context) as made:
        yield made


def removed(number):
    return BlockRemoved([number], "GPU", 0)


def connect(publisher, subscriber):
    """Publish until the subscription has arrived; the batches that the subscriber returned, all
    that were published, with none on its way any more."""
    received, num_published = [], 0
    while not received:
        publisher.publish([removed(0)])
        num_published += 1
        received = receive_despite_loss(subscriber, 0.01)
    while subscriber._last_live_seq < num_published - 1:
        received += subscriber.receive(TIMEOUT_S)
    return received


def receive_despite_loss(subscriber, timeout_s):
    """Without a replay, what was published before the subscription is lost."""
    try:
        return subscriber.receive(timeout_s)
    except EventsLostError:
        return subscriber.receive(timeout_s)


def lose(subscriber, count):
    """Take `count` live batches off the socket, as if they had never arrived."""
    for _ in range(count):
        assert subscriber._live.poll(TIMEOUT_S * 1000)
        subscriber._live.recv_multipart()


def ask(context, *frames):
    """A replay request by hand, and its answers up to the end marker."""
    with context.socket(zmq.DEALER) as socket:
        socket.connect(REPLAY)
        socket.send_multipart(frames)
        answers = []
        while not answers or answers[-1][-2] != END_OF_REPLAY:
            assert socket.poll(TIMEOUT_S * 1000)
            answers.append(socket.recv_multipart())
        return answers


def test_frames_of_a_live_batch(publisher, subscriber):
    """Topic, 8-byte big-endian number, payload with time and rank."""
    num_published = len(connect(publisher, subscriber))
    publisher.publish([removed(9)])
    assert subscriber._live.poll(TIMEOUT_S * 1000)
    topic, number, payload = subscriber._live.recv_multipart()
    assert topic == b"kv"
    assert number == num_published.to_bytes(8, "big")
    assert decode_batch(payload) == KVEventBatch(1.5, [removed(9)], 0)


def test_frames_of_a_replay(context, publisher):
    """Empty, number, payload; from the number asked for; the last number is -1."""
    for number in range(4):
        publisher.publish([removed(number)])
    payloads = [encode_batch(KVEventBatch(1.5, [removed(n)], 0)) for n in range(4)]
    assert ask(context, b"", (2).to_bytes(8, "big")) == [
        [b"", (2).to_bytes(8, "big"), payloads[2]],
        [b"", (3).to_bytes(8, "big"), payloads[3]],
        [b"", b"\xff" * 8, b""],
    ]


def test_issue_45174_a_replay_may_carry_the_topic(context):
    """Consumers of several engines need it: topic, number, payload, as in a live batch."""
    with both_ends(context, topic="kv@pod", replay_includes_topic=True) as (publisher, _):
        publisher.publish([removed(0)])
        first, last = ask(context, b"", bytes(8))
    assert first[:3] == [b"", b"kv@pod", bytes(8)]
    assert last == [b"", b"", END_OF_REPLAY, b""]


def test_a_request_that_is_none_is_passed_over(context, publisher, caplog):
    """It gets no answer, a warning is logged, and the next request is served."""
    with context.socket(zmq.DEALER) as socket:
        socket.connect(REPLAY)
        socket.send_multipart((b"", b"short"))
        socket.send_multipart((b"", bytes(8)))
        assert socket.poll(TIMEOUT_S * 1000)
        assert socket.recv_multipart() == [b"", END_OF_REPLAY, b""]
    assert "is not understood" in caplog.text


@pytest.mark.parametrize("with_topic", [False, True])
def test_issue_45174_a_lost_batch_is_asked_for_again(context, with_topic):
    """The subscriber returns every batch once and in order, whichever form the replay has."""
    with both_ends(context, replay_includes_topic=with_topic) as (publisher, subscriber):
        received = connect(publisher, subscriber)
        num_wanted = len(received) + 6
        for number in range(1, 7):
            publisher.publish([removed(number)])
        lose(subscriber, 3)
        while len(received) < num_wanted:
            received += subscriber.receive(TIMEOUT_S)
    assert [entry.seq for entry in received] == list(range(len(received)))
    assert [entry.batch.events for entry in received[-6:]] == [[removed(n)] for n in range(1, 7)]


def test_a_late_subscriber_catches_up(publisher, subscriber):
    """What was published before it came is had by a replay, and then not returned again."""
    for number in range(3):
        publisher.publish([removed(number)])
    assert [entry.seq for entry in subscriber.catch_up()] == [0, 1, 2]
    assert subscriber.catch_up() == []


def test_a_batch_that_nobody_has_is_a_loss_once(context):
    """The publisher keeps few batches: the error names those that are gone, then it goes on."""
    with both_ends(context, replay_batches_max=2) as (publisher, subscriber):
        for number in range(5):
            publisher.publish([removed(number)])
        with pytest.raises(EventsLostError, match="batches 0 to 2 cannot be had any more"):
            subscriber.catch_up()
        assert [entry.seq for entry in subscriber.receive(TIMEOUT_S)] == [3, 4]


def test_without_replay_a_gap_is_a_loss(context, publisher):
    """The batch behind the gap comes after the error."""
    with KVEventSubscriber(LIVE, topic="kv", context=context) as subscriber:
        connect(publisher, subscriber)
        for number in (1, 2):
            publisher.publish([removed(number)])
        lose(subscriber, 1)
        with pytest.raises(EventsLostError, match="cannot be had any more"):
            subscriber.receive(TIMEOUT_S)
        assert subscriber.receive(TIMEOUT_S)[0].batch.events == [removed(2)]
        with pytest.raises(ValueError, match="catch_up needs a replay_endpoint"):
            subscriber.catch_up()


def test_a_publisher_that_began_anew_is_recognised(context):
    """Its numbers come again: what was known is wrong, and its own batches follow."""
    with context.socket(zmq.XPUB) as live, KVEventSubscriber(LIVE, context=context) as subscriber:
        live.bind(LIVE)
        assert live.poll(TIMEOUT_S * 1000)
        assert live.recv() == b"\x01"
        for seq in (0, 1, 0):
            payload = encode_batch(KVEventBatch(0.0, [removed(seq)]))
            live.send_multipart((b"", seq.to_bytes(8, "big"), payload))
        assert [subscriber.receive(TIMEOUT_S)[0].seq for _ in range(2)] == [0, 1]
        with pytest.raises(EventsLostError, match="the publisher began anew"):
            subscriber.receive(TIMEOUT_S)
        assert [entry.seq for entry in subscriber.receive(TIMEOUT_S)] == [0]


def test_a_replay_that_never_ends_times_out(context, publisher):
    """The error names the setting."""
    with context.socket(zmq.ROUTER) as silent:
        silent.bind("inproc://silent")
        with (
            KVEventSubscriber(
                LIVE, "inproc://silent", replay_timeout_s=0.01, context=context
            ) as subscriber,
            pytest.raises(TimeoutError, match=r"for 0.01 s \(replay_timeout_s\)"),
        ):
            subscriber.catch_up()


def engine_map(manager):
    """Blocks per (group, hash) as the pool itself has them."""
    return Counter((0, block_hash) for block_hash in manager.pool.block_hashes if block_hash)


def test_issue_45174_the_block_map_is_rebuilt_despite_a_loss(publisher, subscriber):
    """Hits, copies, evictions and a reset: after each stage the consumer knows the pool's map,
    though half of the live batches never arrived."""
    manager = make_manager(24, events=KVEventLog(use_int_block_hashes=False))
    known = BlockMap()
    connect_batches = connect(publisher, subscriber)
    seq = connect_batches[-1].seq

    def publish_step():
        nonlocal seq
        publisher.publish(manager.take_events())
        seq += 1
        if seq % 2:
            lose(subscriber, 1)

    def follow():
        for entry in subscriber.catch_up():
            known.apply(entry.batch.events)
        assert known.num_blocks == engine_map(manager)

    for name in ("a", "b", "c"):
        request = make_request(name, [*range(9), ord(name)] * 2)
        admit(manager, request)
        publish_step()
        decode(manager, request, [7, 8])
        publish_step()
        manager.free(request)
    twins = [make_request(name, range(50, 54)) for name in ("twin 1", "twin 2")]
    for twin in twins:
        admit(manager, twin)
    publish_step()
    follow()
    assert max(known.num_blocks.values()) == 2
    for twin in twins:
        manager.free(twin)
    admit(manager, make_request("d", range(100, 180)))
    publish_step()
    follow()
    manager.free(make_request("d", range(1)))
    assert manager.reset_prefix_cache()
    publish_step()
    follow()
    assert not known.num_blocks


def test_the_removal_of_an_unknown_block_is_refused():
    """It shows that a batch is missing."""
    known = BlockMap()
    stored = BlockStored([1], None, [1], 1, None, "GPU", None, group_idx=0)
    known.apply([stored, stored, removed(1), removed(1)])
    assert (0, 1) not in known
    with pytest.raises(ValueError, match=r"block \(0, 1\) was removed but never stored"):
        known.apply([removed(1)])


def test_a_full_queue_drops_the_batch_not_its_number(context, caplog):
    """The engine never waits; the subscriber learns that a batch is gone."""
    with both_ends(context, queue_batches_max=1) as (publisher, subscriber):
        while "dropped" not in caplog.text:
            publisher.publish([removed(0)])
        with pytest.raises(EventsLostError):
            catch_up_while_publishing(publisher, subscriber)


def catch_up_while_publishing(publisher, subscriber):
    """Until something is raised; bounded."""
    for _ in range(1000):
        subscriber.catch_up()
        publisher.publish([removed(0)])


def test_closing_is_final_and_may_be_repeated(context):
    """Nothing is published after it; an endpoint in use and bad sizes are named."""
    publisher = KVEventPublisher(LIVE, REPLAY, context=context)
    with pytest.raises(OSError, match="cannot bind 'inproc://live'"):
        KVEventPublisher(LIVE, context=context)
    publisher.close()
    publisher.close()
    with pytest.raises(RuntimeError, match="publisher is closed"):
        publisher.publish([removed(1)])
    for setting in ("queue_batches_max", "replay_batches_max"):
        with pytest.raises(ValueError, match=f"{setting} must be >= 1, got 0"):
            KVEventPublisher(LIVE, context=context, **{setting: 0})


def test_own_contexts_over_tcp():
    """Without a shared context each end has its own; the system chooses the ports."""
    with (
        KVEventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*") as publisher,
        KVEventSubscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber,
    ):
        publisher.publish([removed(4)])
        (entry,) = subscriber.catch_up()
    assert entry.batch.events == [removed(4)]


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    """Without pyzmq the error says what to install."""
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ModuleNotFoundError, match=r"need zmq: .*'slotmirror\[events\]'"):
        KVEventPublisher(LIVE)
