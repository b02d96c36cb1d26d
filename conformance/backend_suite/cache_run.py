"""A whole cache on the backend under test: a drawn trace, played, and everything it delivered.

The engine's outputs lie in the same device buffers in every step and are overwritten as soon as
they were saved; steps are consumed late, by another thread, in the order of their ids. So the
delivered bytes depend on the trace alone, and the reference must deliver the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from slotmirror.conformance.backend_suite.check import require
from slotmirror.conformance.backend_suite.landing import fetched
from slotmirror.conformance.backend_suite.values import bytes_of
from slotmirror.conformance.backend_suite.workbench import WAIT_S, Workbench
from slotmirror.conformance.traces.generate import TraceOptions, draw_trace
from slotmirror.conformance.traces.trace import Trace, TraceStep
from slotmirror.core.key_spec import HIDDEN_KEY, KeySpec
from slotmirror.core.manager import PrefixCacheManager
from slotmirror.core.merge import StageOutputs

STEPS = 40

KEYS: dict[str, KeySpec] = {
    HIDDEN_KEY: KeySpec(HIDDEN_KEY, (24,), torch.bfloat16),
    "codes.audio": KeySpec("codes.audio", (16,), torch.int64),
    "layer": KeySpec("layer", (3, 5), torch.float32),
    "mask": KeySpec("mask", (7,), torch.uint8),
    "meta": KeySpec("meta", (2, 2), torch.int16),
}
"""The layouts of the trace's keys; `meta` is computed on the host."""

HOST_KEY = "meta"
_JUNK = 0x5C
_DEFERRED_BYTES_MAX = 4096
_CHUNK_BYTES = 600
"""Bounce buffers of a few rows, so that deferred batches take several."""

Delivery = tuple[int, str, str, tuple[int, int], bytes]
"""Step id, request, key, span of the request, bytes."""


@dataclass(frozen=True, slots=True)
class Variant:
    """How the cache is run; what it delivers must not depend on it.

    direct  long runs of slots are copied straight into a page-locked pool
    device  outputs are delivered on the device, and fetched from there
    """

    committer: Literal["threaded", "inline"] = "inline"
    direct: bool = False
    device: bool = False


def played(bench: Workbench, seed: int, variant: Variant) -> list[Delivery]:
    """Everything that a cache on the bench's backend delivers for the trace of this seed."""
    trace, _ = draw_trace(seed, TraceOptions(steps=STEPS, calm=True))
    with _cache(bench, trace, variant) as cache, ThreadPoolExecutor(1) as consumer:
        run = _Run(bench, cache, consumer, device=variant.device)
        for step in trace.steps:
            run.step(step)
            run.consume(leave=trace.config.staging_depth - 1)
        run.consume(leave=0)
        cache.quiesce(WAIT_S)
        rows_direct = cache.stats()["rows_captured_directly"]
    require(rows_direct or not variant.direct, f"trace {seed}: no row was captured directly")
    return run.deliveries


@contextmanager
def _cache(bench: Workbench, trace: Trace, variant: Variant) -> Iterator[PrefixCacheManager]:
    config = replace(
        trace.config,
        committer=variant.committer,
        pin_pool=variant.direct,
        direct_capture_rows_min=2 if variant.direct else None,
        staging_claim_timeout_s=WAIT_S,
        device_staging_bytes_max=_DEFERRED_BYTES_MAX,
        copy_chunk_bytes=_CHUNK_BYTES,
    )
    cache = PrefixCacheManager(config, bench.backend)
    try:
        cache.register_policy(trace.policy)
        yield cache
    finally:
        cache.shutdown()


class _Run:
    """The engine's side of one run."""

    def __init__(
        self,
        bench: Workbench,
        cache: PrefixCacheManager,
        consumer: ThreadPoolExecutor,
        *,
        device: bool,
    ) -> None:
        self.deliveries: list[Delivery] = []
        self._bench = bench
        self._cache = cache
        self._consumer = consumer
        self._device = device
        self._unconsumed: list[int] = []
        self._buffers: dict[tuple[str, int], torch.Tensor] = {}

    def step(self, step: TraceStep) -> None:
        """One step of the engine: start, forward, save, and the next forward's overwriting."""
        self._cache.new_step_starts(step.events)
        if not step.saved:
            return
        stamps = np.concatenate([_stamps(step, name) for name in step.order])
        outputs = {key: self._computed(key, stamps) for key in step.keys}
        hidden = outputs.pop(HIDDEN_KEY, None)
        step_id = self._cache.save_outputs(
            hidden, outputs, num_tokens_unpadded=len(stamps), req_ids=step.order
        )
        self._unconsumed.append(step_id)
        for key in step.keys:
            self._overwrite(key, len(stamps))

    def consume(self, leave: int) -> None:
        """Let the consumer's thread take the oldest steps, one at a time."""
        while len(self._unconsumed) > leave:
            step_id = self._unconsumed.pop(0)
            taken = self._consumer.submit(self._cache.materialize, step_id, device=self._device)
            self._deliver(step_id, taken.result(WAIT_S))

    def _deliver(self, step_id: int, out: StageOutputs) -> None:
        if out.arrival is not None:
            out.arrival.wait_on(self._bench.backend.current_stream())
        keys: dict[str, Mapping[str, object]] = dict(out.mm_outputs)
        if out.hidden_states is not None:
            keys[HIDDEN_KEY] = out.hidden_states
        for key, by_request in sorted(keys.items()):
            for req_id, rows in by_request.items():
                if isinstance(rows, torch.Tensor):
                    delivered = (step_id, req_id, key, out.spans[req_id], self._bytes(rows))
                    self.deliveries.append(delivered)

    def _bytes(self, rows: torch.Tensor) -> bytes:
        on_device = self._device and rows.numel() and self._bench.backend.owns(rows)
        return bytes_of(fetched(self._bench, rows) if on_device else rows).numpy().tobytes()

    def _computed(self, key: str, stamps: np.ndarray) -> torch.Tensor:
        values = rows(KEYS[key], stamps)
        if key == HOST_KEY:
            self._buffers[key, len(stamps)] = values
            return values
        buffer = self._buffer(key, len(stamps))
        self._bench.write(buffer, self._bench.tensor(values))
        return buffer

    def _overwrite(self, key: str, count: int) -> None:
        spec = KEYS[key]
        junk = torch.full((count * spec.row_bytes,), _JUNK, dtype=torch.uint8)
        junk = junk.view(spec.dtype).view(count, *spec.trailing_shape)
        if key == HOST_KEY:
            self._buffers[key, count].copy_(junk)
        else:
            self._bench.write(self._buffer(key, count), self._bench.tensor(junk))

    def _buffer(self, key: str, count: int) -> torch.Tensor:
        if (key, count) not in self._buffers:
            spec = KEYS[key]
            empty = torch.zeros((count, *spec.trailing_shape), dtype=spec.dtype)
            self._buffers[key, count] = self._bench.tensor(empty)
        return self._buffers[key, count]


def rows(spec: KeySpec, stamps: np.ndarray) -> torch.Tensor:
    """The rows that these writes have, `(len(stamps), *trailing_shape)`; each has its own bytes."""
    drawn = [
        np.random.default_rng([int(stamp), len(spec.name)]).bytes(spec.row_bytes)
        for stamp in stamps
    ]
    raw = torch.frombuffer(bytearray(b"".join(drawn)), dtype=torch.uint8)
    return raw.view(spec.dtype).view(len(stamps), *spec.trailing_shape)


def _stamps(step: TraceStep, name: str) -> np.ndarray:
    [part] = [part for part in step.parts if part.req_id == name]
    return np.arange(part.stamps, part.stamps + len(part.slots))
