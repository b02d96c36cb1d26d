"""The batches that a publisher can send once more."""

from collections import deque
from collections.abc import Iterator


class ReplayBuffer:
    """The last `capacity` payloads with their ascending sequence numbers. One thread."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"replay_batches_max must be >= 1, got {capacity}")
        self._entries: deque[tuple[int, bytes]] = deque(maxlen=capacity)

    def append(self, seq: int, payload: bytes) -> None:
        """Keep a payload, dropping the oldest if there are too many."""
        self._entries.append((seq, payload))

    def since(self, first_seq: int) -> Iterator[tuple[int, bytes]]:
        """The kept payloads from `first_seq` on, with their sequence numbers."""
        return (entry for entry in self._entries if entry[0] >= first_seq)
