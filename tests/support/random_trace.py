"""One seeded run: engine, mover and builders interleaved at random, checked against the model."""

from __future__ import annotations

import random
from collections import Counter

import torch

from slotmirror.core.errors import MissingRowsError, PrefixCacheError, ReplayOrderError
from slotmirror.core.merge import StageOutputs
from slotmirror.core.policy import ModelCachePolicy
from support.caches import Driver
from support.plain_model import HIDDEN, PlainModel, row_of
from support.toy_engine import ToyEngine, ToyStep

OPTIONAL_KEYS = ("codes", "layer")


class RandomTrace:
    """Runs one seed. Any difference from the model raises AssertionError with the log's tail."""

    def __init__(self, seed: int, *, committer: str = "threaded", prefetch: bool | None = None):
        self.seed = seed
        # Decisions of the engine and of the schedule come from streams of their own, so that
        # the same seed runs the same steps under every schedule.
        rng = random.Random(seed)
        self._schedule = random.Random(seed + 1)
        self.counts: Counter[str] = Counter()
        self.outputs: list[tuple[int, str, str, bytes]] = []
        block_size = rng.choice([1, 2, 4])
        num_blocks = rng.randrange(12, 40) * 4 // block_size
        self._needs_hidden = rng.random() < 0.8
        drawn_prefetch = rng.random() < 0.7
        self._rng = rng
        self._driver = Driver(
            num_blocks=num_blocks,
            block_size=block_size,
            policy=ModelCachePolicy(
                needs_full_hidden_states=self._needs_hidden,
                deferred_keys=frozenset(key for key in OPTIONAL_KEYS if rng.random() < 0.5),
            ),
            device_staging_bytes_max=rng.choice([100, 1000, 100_000]),
            copy_chunk_bytes=rng.choice([24, 100, 10_000]),
            staging_depth=rng.randrange(1, 5),
            staging_capacity_tokens=128,
            prefetch=drawn_prefetch if prefetch is None else prefetch,
            committer=committer,
        )
        self._engine = ToyEngine(rng, num_blocks=num_blocks, block_size=block_size)
        self._model = PlainModel()
        self._driver.runtime.actors.append(self._consume_one)

    def run(self, steps: int) -> Counter[str]:
        """Run the engine for `steps` steps, consume everything, and check the end state."""
        try:
            for _ in range(steps):
                self._one_step()
            while self._model.unconsumed:
                self._consume_one()
            self._driver.settle()
            stats = self._driver.cache.stats()
            assert stats["pages_held"] == 0, stats
            assert stats["log_length"] == 0, stats
            self._driver.cache.shutdown()
            assert self._driver.cache.memory_stats()["deferred_device_bytes"] == 0
            for reason, count in self._driver.cache._stats.batches_closed.items():
                self.counts[f"batches closed by {reason}"] += count
            self.counts["deferred rows dead"] += self._driver.cache._stats.deferred_rows_dead
        except AssertionError as error:
            tail = "\n".join(self._driver.cache.log_tail()[-20:])
            raise AssertionError(f"seed {self.seed}: {error}\nlog tail:\n{tail}") from error
        self.counts["preemptions"] += self._engine.preemptions
        self.counts["recycled blocks"] += self._engine.recycled_blocks
        self.counts["own-step hit tokens"] += int(str(stats["own_step_hit_tokens"]))
        return self.counts

    # -- the engine thread ------------------------------------------------------------------

    def _one_step(self) -> None:
        step = self._engine.step()
        self._let_others_act()
        self._driver.cache.new_step_starts(step.events)
        self._model.start(step)
        self.counts["hits"] += sum(part.hit > 0 for part in step.parts)
        self._let_others_act()
        if not step.parts or self._rng.random() < 0.04:
            self.counts["steps without a save"] += 1
            return
        self._save(step)
        self._let_others_act()

    def _save(self, step: ToyStep) -> None:
        rng = self._rng
        keys = [HIDDEN] if self._needs_hidden else []
        keys += [key for key in OPTIONAL_KEYS if rng.random() < 0.6]
        order = [part.request.req_id for part in step.parts]
        if rng.random() < 0.4:
            rng.shuffle(order)
        by_name = {part.request.req_id: part for part in step.parts}
        padding = rng.randrange(3)
        buffers = {}
        for key in keys:
            computed = [
                row_of(by_name[name].request.tokens, position, key)
                for name in order
                for position in range(
                    by_name[name].first, by_name[name].first + by_name[name].count
                )
            ]
            buffers[key] = torch.tensor(computed + [(-1, -1, -1)] * padding, dtype=torch.int64)
        count = sum(part.count for part in step.parts)
        hidden = buffers.pop(HIDDEN, None)
        step_id = self._driver.cache.save_outputs(
            hidden,
            buffers,
            num_tokens_unpadded=count,
            num_tokens_padded=count + padding,
            req_ids=order,
        )
        for buffer in (hidden, *buffers.values()):  # the next forward overwrites them (D9)
            if buffer is not None:
                buffer.fill_(-7)
        self._model.save(step_id, keys, needs_hidden=self._needs_hidden)

    # -- everybody else ---------------------------------------------------------------------

    def _let_others_act(self) -> None:
        for _ in range(self._schedule.randrange(4)):
            if self._schedule.random() < 0.5:
                self._driver.cache._plane.committer.step()
            else:
                self._consume_one()

    def _consume_one(self) -> bool:
        """A builder takes one step that waits; True if one was consumed."""
        if not self._model.unconsumed:
            return False
        rng = random.Random(self.seed * 7919 + min(self._model.unconsumed))
        step_id = self._schedule.choice(sorted(self._model.unconsumed))
        blockers = self._model.must_wait_for(step_id)
        step = self._model.unconsumed[step_id]
        if blockers:
            self._expect(ReplayOrderError, step_id)
            self.counts["replays asked for too early"] += 1
            step_id = min(blockers)
            step = self._model.unconsumed[step_id]
            if self._model.must_wait_for(step_id):
                return self._consume_one()
        if rng.random() < 0.06:
            self._driver.cache.discard_step(step_id)
            self._model.consumed(step_id, [])
            self.counts["discards"] += 1
            return True
        names = list(step.parts)
        missing = [name for name in names if step.parts[name].missing]
        if missing:
            self._expect(MissingRowsError, step_id)
            self.counts["hits without rows"] += len(missing)
            names = [name for name in names if name not in missing]
        if rng.random() < 0.1:
            names = [name for name in names if rng.random() < 0.5]
        self._check(step_id, names, self._driver.cache.materialize(step_id, names))
        return True

    def _expect(self, error: type[PrefixCacheError], step_id: int) -> None:
        try:
            self._driver.cache.materialize(step_id)
        except error:
            return
        raise AssertionError(f"step {step_id} was delivered in spite of {error.__name__}")

    def _check(self, step_id: int, names: list[str], out: StageOutputs) -> None:
        assert list(out.spans) == names
        for name in names:
            span, keys = self._model.expected(step_id, name)
            assert out.spans[name] == span, (step_id, name, out.spans[name], span)
            got = {key: rows[name] for key, rows in out.mm_outputs.items() if name in rows}
            if out.hidden_states is not None:
                got[HIDDEN] = out.hidden_states[name]
            assert set(got) == set(keys), (step_id, name, set(got), set(keys))
            for key, (key_span, rows) in keys.items():
                tensor = got[key]
                assert isinstance(tensor, torch.Tensor)
                found = [tuple(row) for row in tensor.tolist()]
                assert found == rows, (step_id, name, key, key_span, found, rows)
                reported = out.key_spans[key][name] if key in out.key_spans else span
                assert reported == key_span, (step_id, name, key, reported, key_span)
                self.counts["rows"] += len(rows)
                self.outputs.append((step_id, name, key, tensor.numpy().tobytes()))
        self._model.consumed(step_id, names)
