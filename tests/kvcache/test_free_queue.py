"""The free queue against the obvious model: a list of ids and a dictionary of counts."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slotmirror.kvcache.free_queue import NULL_BLOCK_ID, FreeBlockQueue

NUM_BLOCKS = 9


class FreeQueueMachine(RuleBasedStateMachine):
    """Random takes, shares and releases on both."""

    def __init__(self):
        super().__init__()
        self.queue = FreeBlockQueue(NUM_BLOCKS)
        self.hashes = [None] * NUM_BLOCKS
        self.free = list(range(1, NUM_BLOCKS))
        self.users = dict.fromkeys(range(1, NUM_BLOCKS), 0)

    @rule(count=st.integers(0, NUM_BLOCKS))
    def take(self, count):
        if count > len(self.free):
            with pytest.raises(ValueError, match=f"only {len(self.free)} are free"):
                self.queue.take(count)
            return
        taken, self.free = self.free[:count], self.free[count:]
        assert self.queue.take(count) == taken
        for block in taken:
            self.users[block] = 1
            self.hashes[block] = None

    @rule(blocks=st.lists(st.integers(1, NUM_BLOCKS - 1), unique=True))
    def share(self, blocks):
        self.queue.share(blocks)
        for block in blocks:
            self.users[block] += 1
        self.free = [block for block in self.free if not self.users[block]]

    @precondition(lambda self: any(self.users.values()))
    @rule(data=st.data())
    def release(self, data):
        held = [block for block, count in self.users.items() if count]
        blocks = data.draw(st.lists(st.sampled_from(held), unique=True, min_size=1))
        for block in blocks:
            if data.draw(st.booleans()):
                self.hashes[block] = b"h"
        self.queue.release([*blocks, NULL_BLOCK_ID], self.hashes)
        for block in blocks:
            self.users[block] -= 1
        freed = [block for block in blocks if not self.users[block]]
        unhashed = [block for block in freed if self.hashes[block] is None]
        hashed = [block for block in freed if self.hashes[block] is not None]
        self.free = [*unhashed, *self.free, *hashed]

    @invariant()
    def same_order_and_counts(self):
        assert list(self.queue) == self.free
        assert self.queue.num_free == len(self.free)
        assert self.queue.ref_counts[1:] == list(self.users.values())

    @invariant()
    def links_are_a_ring(self):
        block, seen = self.queue._prev[NUM_BLOCKS], []
        while block != NUM_BLOCKS:
            seen.append(block)
            block = self.queue._prev[block]
        assert seen == self.free[::-1]


FreeQueueMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None
)
TestFreeQueue = FreeQueueMachine.TestCase


def test_the_null_block_is_never_handed_out():
    """Block 0 is not in the queue, at first or after it was released."""
    queue = FreeBlockQueue(4)
    queue.release([NULL_BLOCK_ID], [None] * 4)
    assert queue.take(3) == [1, 2, 3]
    assert queue.num_free == 0
