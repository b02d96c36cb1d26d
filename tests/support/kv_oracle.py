"""The KV oracle: a worker that knows what every slot must hold.

A slot stands for a token prefix of some request. The fake worker builds block tables from the
scheduler's output alone and writes, for every token that a step computes, a fingerprint of its
whole prefix: tokens, adapter, salt, multimodal items, and the epoch of the weights. Before a
request reads its cache, every slot that its next token can see must hold that request's own
fingerprint. The fingerprints are computed here, from the requests alone.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from slotmirror.engine.scheduling.output import SchedulerOutput
from slotmirror.kvcache.block_pool import BlockIds
from slotmirror.kvcache.request import Request
from slotmirror.kvcache.specs import KVCacheGroupSpec

_MASK = (1 << 62) - 1


@dataclass
class Violation:
    """A request would have read something that is not its own."""

    step: int
    req_id: str
    group_id: int
    position: int

    def __str__(self) -> str:
        return f"step {self.step}: {self.req_id} group {self.group_id} position {self.position}"


@dataclass
class TrackedRequest:
    """A request's known tokens, with the fingerprint of every prefix of them."""

    request: Request
    tokens: list[int]
    epoch: int
    prints: list[int] = field(default_factory=list)

    def restart(self, epoch: int) -> None:
        """All KV of this request is computed anew, with the weights of `epoch`."""
        self.epoch = epoch
        self.prints.clear()

    def begin_turn(self, num_computed: int, token_ids: Sequence[int]) -> None:
        """A session goes on: what was computed stays, a sampled token beyond it does not."""
        self.tokens[num_computed:] = token_ids
        del self.prints[num_computed + 1 :]

    def prefix_prints(self, names: "Names", end: int, drafts: Sequence[int] = ()) -> list[int]:
        """Fingerprints of the prefixes that end at positions [0, end); `drafts` follow the known
        tokens."""
        if not self.prints:
            lora, salt = self.request.lora_request, self.request.cache_salt
            adapter = (lora.name, lora.path, lora.version) if lora else None
            self.prints.append(hash((self.epoch, names[adapter], names["salt", salt or None])))
        for position in range(len(self.prints) - 1, min(end, len(self.tokens))):
            self.prints.append(self._print(names, position, self.tokens[position], self.prints[-1]))
        prints = self.prints[: end + 1]
        for position, token in enumerate(drafts[: end - len(self.tokens)], len(self.tokens)):
            prints.append(self._print(names, position, token, prints[-1]))
        return prints[1:]

    def _print(self, names: "Names", position: int, token: int, before: int) -> int:
        items = [
            (names["item", feature.identifier], position - feature.offset)
            for feature in self.request.mm_features
            if feature.offset <= position < feature.end
        ]
        return hash((before, token, *items)) & _MASK


class Names(dict[object, int]):
    """Small numbers for names, so that fingerprints do not depend on the process's hash seed."""

    def __missing__(self, name: object) -> int:
        self[name] = len(self) + 1
        return self[name]


class OracleWorker:
    """Executes scheduler outputs on slots that hold fingerprints; collects violations."""

    def __init__(self, num_blocks: int, groups: Sequence[KVCacheGroupSpec]) -> None:
        self._specs = [group.spec for group in groups]
        self._slots: list[NDArray[np.int64]] = [
            np.zeros(num_blocks * spec.block_size, dtype=np.int64) for spec in self._specs
        ]
        self._tables: dict[str, list[list[int]]] = {}
        self._names = Names()
        self._step = 0
        self.num_checks = 0
        self.violations: list[Violation] = []

    def execute(self, output: SchedulerOutput, tracked: Mapping[str, TrackedRequest]) -> None:
        """One step: tables, then all writes, then all reads, as layers on a device would."""
        self._step += 1
        computed = self._update_tables(output)
        for req_id, num_new in output.num_scheduled_tokens.items():
            drafts = output.scheduled_spec_decode_tokens.get(req_id, ())
            start = computed[req_id]
            self._write(tracked[req_id], req_id, range(start, start + num_new), drafts)
        for req_id in output.num_scheduled_tokens:
            self._check(tracked[req_id], req_id, computed[req_id])

    def _update_tables(self, output: SchedulerOutput) -> dict[str, int]:
        for req_id in output.finished_req_ids | output.preempted_req_ids:
            self._tables.pop(req_id, None)
        computed = {}
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = [list(blocks) for blocks in new.block_ids]
            computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for req_id, blocks, num_computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            computed[req_id] = num_computed
            if req_id in cached.resumed_req_ids:
                assert blocks is not None
                self._tables[req_id] = [list(ids) for ids in blocks]
            elif blocks is not None:
                self._append(req_id, blocks)
        return computed

    def _append(self, req_id: str, blocks: BlockIds) -> None:
        for table, ids in zip(self._tables[req_id], blocks, strict=True):
            table.extend(ids)

    def _slot_ids(self, req_id: str, group_id: int, start: int, end: int) -> NDArray[np.int64]:
        size = self._specs[group_id].block_size
        table = np.asarray(self._tables[req_id][group_id], dtype=np.int64)
        positions = np.arange(start, end)
        return np.asarray(table[positions // size] * size + positions % size)

    def _write(
        self, tracked: TrackedRequest, req_id: str, span: range, drafts: Sequence[int]
    ) -> None:
        prints = tracked.prefix_prints(self._names, span.stop, drafts)[span.start :]
        for group_id, slots in enumerate(self._slots):
            slots[self._slot_ids(req_id, group_id, span.start, span.stop)] = prints

    def _check(self, tracked: TrackedRequest, req_id: str, num_computed: int) -> None:
        """Slots that the token at position `num_computed` reads must hold this request's prefix."""
        expected = np.array(tracked.prefix_prints(self._names, num_computed), dtype=np.int64)
        for group_id, spec in enumerate(self._specs):
            window = spec.window_tokens
            start = 0 if window is None else max(0, num_computed - window + 1)
            found = self._slots[group_id][self._slot_ids(req_id, group_id, start, num_computed)]
            self.num_checks += num_computed - start
            for offset in np.flatnonzero(found != expected[start:]):
                self.violations.append(Violation(self._step, req_id, group_id, start + int(offset)))


def sample_tokens(
    output: SchedulerOutput, tracked: Mapping[str, TrackedRequest], rng: random.Random
) -> dict[str, list[int]]:
    """Tokens a model could have sampled: for requests whose known tokens are all computed now,
    one, plus one for every accepted draft. Requests aborted meanwhile are not `tracked`."""
    sampled = {}
    for req_id in output.num_scheduled_tokens:
        if req_id not in tracked or tracked[req_id].request.is_prefill_chunk:
            continue
        drafts = output.scheduled_spec_decode_tokens.get(req_id, [])
        accepted = drafts[: rng.randint(0, len(drafts))]
        sampled[req_id] = [*accepted, rng.randrange(60, 70)]
    return sampled
