"""Receives KV events without a gap: lost batches are asked for once more (spec kv 7)."""

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from slotmirror.kvcache.event_stream.publisher import END_OF_REPLAY, SEQ_BYTES
from slotmirror.kvcache.event_stream.requirements import load
from slotmirror.kvcache.event_stream.wire import KVEventBatch, decode_batch

if TYPE_CHECKING:
    import zmq

_UNLIMITED = 0


class EventsLostError(RuntimeError):
    """Batches are gone for good, or the publisher began anew: what was rebuilt is wrong.

    Drop it and go on receiving: the next batches are those that still can be had.
    """


@dataclass(frozen=True, slots=True)
class ReceivedBatch:
    """A batch, its sequence number, and the topic of the stream."""

    seq: int
    topic: str
    batch: KVEventBatch


class KVEventSubscriber:
    """The stream of one publisher, from its first batch on. One thread.

    A gap, also the one before the first batch that arrives, is closed with a replay before
    anything later is returned. A publisher that began anew is recognised by a number that comes
    again. Needs pyzmq and msgspec.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        replay_timeout_s: float = 10.0,
        context: "zmq.Context[zmq.Socket[bytes]] | None" = None,
    ) -> None:
        """`topic` is the prefix to subscribe to; without `replay_endpoint` a gap is a loss."""
        self._zmq = load("zmq")
        self._context = context or self._zmq.Context()
        self._owns_context = context is None
        self._live: zmq.Socket[bytes] = self._context.socket(self._zmq.SUB)
        self._live.setsockopt_string(self._zmq.SUBSCRIBE, topic)
        self._live.connect(endpoint)
        self._replay_endpoint = replay_endpoint
        self._replay_timeout_ms = int(replay_timeout_s * 1000)
        self._topic = topic
        self._next_seq = 0
        self._last_live_seq = -1
        self._arrived: deque[tuple[int, bytes]] = deque()

    def receive(self, timeout_s: float) -> list[ReceivedBatch]:
        """The next batches in order; none if nothing new arrives in time.

        Raises EventsLostError, once per loss, and TimeoutError if a replay does not end in time;
        what has arrived is kept for the next call.
        """
        if not self._arrived:
            if not self._live.poll(int(timeout_s * 1000)):
                return []
            topic, number, payload = self._live.recv_multipart()
            self._topic = topic.decode()
            self._arrived.append((int.from_bytes(number, "big"), payload))
            self._check_not_restarted()
        if self._arrived[0][0] > self._next_seq and self._replay_endpoint is not None:
            self._ask_again(self._replay_endpoint)
        return self._take_in_order()

    def catch_up(self) -> list[ReceivedBatch]:
        """Everything published so far that was not returned yet, by asking for a replay.

        Errors as `receive`; ValueError without a `replay_endpoint`.
        """
        if self._replay_endpoint is None:
            raise ValueError("catch_up needs a replay_endpoint")
        self._ask_again(self._replay_endpoint)
        return self._take_in_order()

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._live.close(linger=0)
        if self._owns_context:
            self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _check_not_restarted(self) -> None:
        seq = self._arrived[0][0]
        is_restart = seq <= self._last_live_seq
        self._last_live_seq = seq
        if is_restart:
            self._next_seq = 0
            raise EventsLostError("the publisher began anew: drop all blocks that you know of")

    def _ask_again(self, replay_endpoint: str) -> None:
        """Put what a replay brings before what has arrived."""
        replayed = self._replay_since(self._next_seq, replay_endpoint)
        last = replayed[-1][0] if replayed else -1
        later = [entry for entry in self._arrived if entry[0] > last]
        self._arrived = deque([*replayed, *later])

    def _replay_since(self, first_seq: int, replay_endpoint: str) -> list[tuple[int, bytes]]:
        """A socket per request, so that late answers to a former one cannot be mistaken."""
        replayed: list[tuple[int, bytes]] = []
        with self._context.socket(self._zmq.DEALER) as socket:
            socket.setsockopt(self._zmq.LINGER, 0)
            socket.set_hwm(_UNLIMITED)
            socket.connect(replay_endpoint)
            socket.send_multipart((b"", first_seq.to_bytes(SEQ_BYTES, "big")))
            while socket.poll(self._replay_timeout_ms):
                # With or without the topic: the last two frames are the same.
                *_, number, payload = socket.recv_multipart()
                if number == END_OF_REPLAY:
                    return replayed
                replayed.append((int.from_bytes(number, "big"), payload))
        raise TimeoutError(
            f"a replay from batch {first_seq} on brought nothing more for "
            f"{self._replay_timeout_ms / 1000} s (replay_timeout_s)"
        )

    def _take_in_order(self) -> list[ReceivedBatch]:
        """Arrived batches up to the next gap; a gap in front was not closed: it is a loss."""
        taken: list[ReceivedBatch] = []
        while self._arrived:
            seq, payload = self._arrived[0]
            if seq > self._next_seq:
                if not taken:
                    self._report_loss(seq)
                break
            self._arrived.popleft()
            if seq == self._next_seq:
                self._next_seq += 1
                taken.append(ReceivedBatch(seq, self._topic, decode_batch(payload)))
        return taken

    def _report_loss(self, first_available: int) -> None:
        missing, self._next_seq = self._next_seq, first_available
        raise EventsLostError(
            f"batches {missing} to {first_available - 1} cannot be had any more: drop all blocks "
            "that you know of (the publisher keeps replay_batches_max)"
        )
