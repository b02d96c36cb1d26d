"""Which blocks are in use, and the free ones in eviction order (spec kv 3)."""

from collections.abc import Iterable, Iterator, Sequence

from slotmirror.kvcache.hash_functions import BlockHash

NULL_BLOCK_ID = 0
"""Stands for positions whose KV nobody needs: never free, never handed out."""

_NEVER_FREE = 1 << 60


class FreeBlockQueue:
    """Reference counts of all blocks, and a queue of those whose count is 0.

    The queue is an intrusive doubly linked list: links lie in two flat lists indexed by block id,
    so that nothing is allocated per operation and any block leaves the middle in O(1). Index
    `num_blocks` is the sentinel that closes the ring: its successor is the front (evicted
    first), its predecessor the back.
    """

    __slots__ = ("_next", "_prev", "_sentinel", "num_free", "ref_counts")

    def __init__(self, num_blocks: int) -> None:
        """All blocks but the null block are free, in ascending order."""
        self._sentinel = num_blocks
        self._next = [num_blocks, *range(2, num_blocks + 1), 1]
        self._prev = [num_blocks, num_blocks, *range(1, num_blocks)]
        self.ref_counts = [_NEVER_FREE] + [0] * (num_blocks - 1)
        self.num_free = num_blocks - 1

    def __iter__(self) -> Iterator[int]:
        """Free ids from the front; nothing must change meanwhile."""
        block = self._next[self._sentinel]
        while block != self._sentinel:
            yield block
            block = self._next[block]

    def take(self, count: int) -> list[int]:
        """Hand out the first `count` blocks, each with one user.

        Raises ValueError, changing nothing, if fewer are free.
        """
        if count > self.num_free:
            raise ValueError(f"cannot take {count} blocks: only {self.num_free} are free")
        successors, ref_counts, sentinel = self._next, self.ref_counts, self._sentinel
        block = successors[sentinel]
        taken = []
        for _ in range(count):
            taken.append(block)
            ref_counts[block] = 1
            block = successors[block]
        successors[sentinel] = block
        self._prev[block] = sentinel
        self.num_free -= count
        return taken

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a user to each block; free ones leave the queue, wherever they are in it.

        Released tables lie in the queue back to front, so the blocks of a hit usually neighbour
        each other: a run of neighbours is unlinked with one pair of writes.
        """
        successors, ref_counts = self._next, self.ref_counts
        front = back = -1
        num_taken = 0
        for block in block_ids:
            if ref_counts[block]:
                ref_counts[block] += 1
                continue
            ref_counts[block] = 1
            num_taken += 1
            if successors[block] == front:
                front = block
                continue
            self._unlink(front, back)
            front = back = block
        self._unlink(front, back)
        self.num_free -= num_taken

    def release(self, block_ids: Sequence[int], block_hashes: Sequence[BlockHash | None]) -> None:
        """Take one user off each block, given in the order in which they should be evicted.

        Blocks nobody uses any more are queued in that order: those without a hash at the front,
        because they can never be hit (public issues 42656, 33710), the others at the back.
        """
        successors, predecessors, ref_counts = self._next, self._prev, self.ref_counts
        sentinel, unhashed = self._sentinel, []
        last, num_shared = predecessors[sentinel], 0
        for block in block_ids:
            if ref_counts[block] != 1:
                ref_counts[block] -= 1
                num_shared += 1
                continue
            ref_counts[block] = 0
            if block_hashes[block] is None:
                unhashed.append(block)
            else:
                successors[last] = block
                predecessors[block] = last
                last = block
        successors[last] = sentinel
        predecessors[sentinel] = last
        self.num_free += len(block_ids) - num_shared
        self._prepend(unhashed)

    def _prepend(self, block_ids: Sequence[int]) -> None:
        before, after = self._sentinel, self._next[self._sentinel]
        for block in block_ids:
            self._next[before] = block
            self._prev[block] = before
            before = block
        self._next[before] = after
        self._prev[after] = before

    def _unlink(self, front: int, back: int) -> None:
        """Join what lies before `front` with what lies after `back`; nothing for an empty run."""
        if front >= 0:
            before, after = self._prev[front], self._next[back]
            self._next[before] = after
            self._prev[after] = before
