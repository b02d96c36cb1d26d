"""Publishes KV events over ZeroMQ, and sends lost batches once more (spec kv 7).

Frames of a batch: topic, sequence number (8 bytes, big-endian, from 0), payload. A replay request
is an empty frame and the first sequence number wanted; the answers are an empty frame, a number
and a payload each, the last with `END_OF_REPLAY` and no payload. With `replay_includes_topic` the
topic comes before the number, as in vLLM since 0.26: consumers of many engines need it (public
issue 45174).
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self

from slotmirror.kvcache.event_stream.replay_buffer import ReplayBuffer
from slotmirror.kvcache.event_stream.requirements import load
from slotmirror.kvcache.event_stream.wire import KVEventBatch, encode_batch
from slotmirror.kvcache.events import KVCacheEvent

if TYPE_CHECKING:
    import zmq

_log = logging.getLogger(__name__)

SEQ_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQ_BYTES, "big", signed=True)

_STOP = b""
_LINGER_MS = 1000
_UNLIMITED = 0


class KVEventPublisher:
    """Encodes batches on the caller's thread and sends them on its own.

    Never makes the caller wait: a batch for which there is no room is dropped, here or by ZeroMQ
    for a slow subscriber, but its number is used up, so that subscribers notice. `publish` and
    `close` are for one thread at a time.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        data_parallel_rank: int = 0,
        replay_includes_topic: bool = False,
        replay_batches_max: int = 10_000,
        queue_batches_max: int = 100_000,
        clock: Callable[[], float] = time.time,
        context: "zmq.Context[zmq.Socket[bytes]] | None" = None,
    ) -> None:
        """Bind the endpoints, such as `tcp://*:5557`; port `*` lets the system choose one.

        Args:
            replay_batches_max: batches kept for replay, the latest ones.
            queue_batches_max: batches that may wait to be sent, here and per subscriber.
            clock: seconds since the epoch, the `ts` of a batch.
            context: must be shared by `inproc` endpoints; by default one of its own.

        Raises ModuleNotFoundError without pyzmq and msgspec, ValueError for a bad size, OSError
        for an endpoint that cannot be bound.
        """
        self._zmq = load("zmq")
        load("msgspec.msgpack")
        if queue_batches_max < 1:
            raise ValueError(f"queue_batches_max must be >= 1, got {queue_batches_max}")
        self._buffer = ReplayBuffer(replay_batches_max)
        self._topic = topic.encode()
        self._rank = data_parallel_rank
        self._replay_includes_topic = replay_includes_topic
        self._clock = clock
        self._next_seq = 0
        self._context = context or self._zmq.Context()
        self._owns_context = context is None
        self._sockets: list[zmq.Socket[bytes]] = []
        try:
            self._open_sockets(endpoint, replay_endpoint, queue_batches_max)
        except BaseException:
            self._close_sockets()
            raise
        self._thread = threading.Thread(target=self._run, name="slotmirror-kv-events", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Where subscribers connect, with the port that was chosen."""
        return self._endpoint

    @property
    def replay_endpoint(self) -> str | None:
        """Where replays are asked for; None if there are none."""
        return self._replay_endpoint

    def publish(self, events: Sequence[KVCacheEvent]) -> None:
        """Send the events of one step as one batch. Raises RuntimeError after `close`."""
        if self._inlet.closed:
            raise RuntimeError("the KV-event publisher is closed")
        payload = encode_batch(KVEventBatch(self._clock(), events, self._rank))
        seq = self._next_seq
        self._next_seq += 1
        try:
            self._inlet.send_multipart((_number(seq), payload), self._zmq.DONTWAIT)
        except self._zmq.Again:
            _log.warning("KV-event batch %d dropped: queue_batches_max are waiting", seq)

    def close(self) -> None:
        """Send what waits, then stop; waits for subscribers at most a second. Idempotent."""
        if self._inlet.closed:
            return
        self._inlet.send(_STOP)
        self._thread.join()
        self._close_sockets()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _open_sockets(self, endpoint: str, replay_endpoint: str | None, queue_max: int) -> None:
        kinds = self._zmq
        self._outlet = self._socket(kinds.PUB, queue_max)
        self._endpoint = self._bind(self._outlet, endpoint)
        self._replay: zmq.Socket[bytes] | None = None
        self._replay_endpoint: str | None = None
        if replay_endpoint is not None:
            # A limit would silently cut a long replay short; the buffer bounds it.
            self._replay = self._socket(kinds.ROUTER, _UNLIMITED)
            self._replay_endpoint = self._bind(self._replay, replay_endpoint)
        inbox_name = f"inproc://slotmirror-kv-events-{id(self)}"
        self._inbox = self._socket(kinds.PULL, queue_max)
        self._bind(self._inbox, inbox_name)
        self._inlet = self._socket(kinds.PUSH, queue_max)
        self._inlet.connect(inbox_name)

    def _socket(self, kind: int, queue_max: int) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        self._sockets.append(socket)
        socket.setsockopt(self._zmq.LINGER, _LINGER_MS)
        socket.set_hwm(queue_max)
        return socket

    def _bind(self, socket: "zmq.Socket[bytes]", endpoint: str) -> str:
        try:
            socket.bind(endpoint)
        except self._zmq.ZMQError as cause:
            raise OSError(cause.errno, f"cannot bind {endpoint!r}: {cause}") from cause
        return socket.getsockopt_string(self._zmq.LAST_ENDPOINT)

    def _close_sockets(self) -> None:
        for socket in self._sockets:
            socket.close()
        if self._owns_context:
            self._context.term()

    def _run(self) -> None:
        """The sending thread: batches and replay requests, until told to stop."""
        poller = self._zmq.Poller()
        poller.register(self._inbox, self._zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, self._zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            # Batches first: a replay then has everything that was published before it was asked
            # for.
            if not self._send_waiting():
                return
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay)

    def _send_waiting(self) -> bool:
        """Send the batches that wait; False if one of them is the order to stop."""
        while self._inbox.poll(0):
            number, *payloads = self._inbox.recv_multipart()
            for payload in payloads:
                self._buffer.append(int.from_bytes(number, "big"), payload)
                self._outlet.send_multipart((self._topic, number, payload))
            if number == _STOP:
                return False
        return True

    def _answer(self, replay: "zmq.Socket[bytes]") -> None:
        request = replay.recv_multipart()
        if len(request) != 3 or len(request[2]) != SEQ_BYTES:
            _log.warning("replay request of %d frames is not understood", len(request))
            return
        client, _, first_seq = request
        head, end = [client, b""], [client, b""]
        if self._replay_includes_topic:
            head.append(self._topic)
            end.append(b"")
        for seq, payload in self._buffer.since(int.from_bytes(first_seq, "big")):
            replay.send_multipart((*head, _number(seq), payload))
        replay.send_multipart((*end, END_OF_REPLAY, b""))


def _number(seq: int) -> bytes:
    return seq.to_bytes(SEQ_BYTES, "big")
