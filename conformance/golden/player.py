"""Plays recorded steps on one backend: the engine's side, and a consumer that it waits for.

What is delivered then depends on the trace alone, not on the mode or the device (H5).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from slotmirror.conformance.backend_suite.landing import fetched
from slotmirror.conformance.backend_suite.workbench import WAIT_S, Workbench
from slotmirror.conformance.golden.recording import RecordedStep
from slotmirror.conformance.traces.outputs import leftover_values
from slotmirror.conformance.traces.rows import HOST_KEY, RowTable, Stamps, as_tensor
from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.key_spec import HIDDEN_KEY
from slotmirror.core.manager import PrefixCacheManager
from slotmirror.core.merge import StageOutputs
from slotmirror.core.policy import ModelCachePolicy

_JUNK = 0x5C


@dataclass(frozen=True, slots=True)
class Mode:
    """How the cache is run; what it delivers must not depend on it.

    committer  threaded: the consumer is a thread of its own too
    direct     long runs of slots are copied straight into a page-locked pool
    device     outputs are delivered on the device, and fetched from there
    """

    committer: Literal["threaded", "inline"] = "threaded"
    prefetch: bool = True
    direct: bool = False
    device: bool = False

    def __str__(self) -> str:
        ways = [self.committer, f"prefetch {'on' if self.prefetch else 'off'}"]
        return ", ".join(ways + [way for way in ("direct", "device") if getattr(self, way)])

    def applied(self, config: Mapping[str, Any]) -> PrefixCacheConfig:
        """A trace's settings, run this way."""
        ways: dict[str, Any] = {"committer": self.committer, "prefetch": self.prefetch}
        if self.direct:
            ways |= {"pin_pool": True, "direct_capture_rows_min": 2}
        return PrefixCacheConfig(**{**config, **ways})


class Player:
    """One cache, and the stage that computes for it."""

    def __init__(
        self,
        bench: Workbench,
        rows: RowTable,
        config: Mapping[str, Any],
        policy: Mapping[str, Any],
        mode: Mode,
    ) -> None:
        self._bench = bench
        self._rows = rows
        self._mode = mode
        self._cache = PrefixCacheManager(mode.applied(config), bench.backend)
        self._cache.register_policy(policy_of(policy))
        self._consumer = ThreadPoolExecutor(1) if mode.committer == "threaded" else None
        self._step_ids: dict[int, int] = {}

    def start(self, step: RecordedStep) -> None:
        """The step begins; its cache may have been reset before, or be reset right after."""
        if step.reset == "before":
            self._cache.reset()
        self._cache.new_step_starts(step.events)
        if step.reset == "during":
            self._cache.reset()

    def save(self, step: RecordedStep) -> None:
        """The forward has run: save its outputs, which the next one overwrites at once (D9)."""
        stamps = _page_stamps(step)
        outputs = {key: self._output(step, key, stamps) for key in step.keys}
        kept = list(outputs.values())
        hidden = outputs.pop(HIDDEN_KEY, None)
        mm_outputs: dict[str, object] = dict(outputs)
        if step.leftover:
            mm_outputs.update(self._leftovers(stamps))
        self._step_ids[step.number] = self._cache.save_outputs(
            hidden,
            mm_outputs,
            num_tokens_unpadded=len(stamps),
            num_tokens_padded=len(stamps) + step.padding,
            req_ids=step.order,
        )
        for tensor in kept:
            self._overwrite(tensor)

    def take(self, step: int, req_ids: tuple[str, ...]) -> StageOutputs:
        """Materialise some requests of the step with this number."""
        call = partial(
            self._cache.materialize, self._step_ids[step], req_ids, device=self._mode.device
        )
        out = call() if self._consumer is None else self._consumer.submit(call).result(WAIT_S)
        if out.arrival is not None:
            out.arrival.wait_on(self._bench.backend.current_stream())
        return out

    def sha256(self, step: int, req_ids: tuple[str, ...]) -> str:
        """Take them, and hash what was delivered."""
        return delivered_sha256(self.take(step, req_ids), req_ids, self._on_host)

    def discard(self, step: int) -> None:
        """Consume the step with this number without its rows."""
        self._cache.discard_step(self._step_ids[step])

    def finish(self) -> None:
        """Everything was taken: let the cache come to rest, and end it."""
        self._cache.quiesce(WAIT_S)
        self.close()

    def close(self) -> None:
        """End the cache, wherever it stands."""
        if self._consumer is not None:
            self._consumer.shutdown()
        self._cache.shutdown()

    @property
    def has_captured_directly(self) -> bool:
        """Whether a row went from the device straight into the pool."""
        return bool(self._cache.stats()["rows_captured_directly"])

    def _output(self, step: RecordedStep, key: str, stamps: Stamps) -> torch.Tensor:
        rows = self._rows.rows(key, stamps)
        if key == HOST_KEY:
            return as_tensor(key, rows)
        padding = np.full((step.padding * (key in step.padded), rows.shape[1]), _JUNK, np.uint8)
        values = self._bench.tensor(as_tensor(key, np.concatenate((rows, padding))))
        output = self._bench.tensor(torch.zeros(values.shape, dtype=values.dtype))
        self._bench.write(output, values)  # queued, as a forward is when its outputs are saved
        return output

    def _leftovers(self, stamps: Stamps) -> dict[str, object]:
        return {
            name: self._bench.tensor(value) if isinstance(value, torch.Tensor) else value
            for name, value in leftover_values(stamps).items()
        }

    def _on_host(self, rows: torch.Tensor) -> torch.Tensor:
        on_device = self._mode.device and rows.numel() and self._bench.backend.owns(rows)
        return fetched(self._bench, rows) if on_device else rows

    def _overwrite(self, tensor: torch.Tensor) -> None:
        junk = torch.full((tensor.nbytes,), _JUNK, dtype=torch.uint8)
        junk = junk.view(tensor.dtype).view(tensor.shape)
        if self._bench.backend.owns(tensor):
            self._bench.write(tensor, self._bench.tensor(junk))
        else:
            tensor.copy_(junk)


def config_of(config: PrefixCacheConfig) -> dict[str, Any]:
    """The settings that differ from the defaults, without those that a player chooses."""
    sizes: dict[str, Any] = {"num_blocks": config.num_blocks, "block_size": config.block_size}
    default = asdict(PrefixCacheConfig(**sizes))
    changed = {name: value for name, value in asdict(config).items() if default[name] != value}
    changed.pop("committer", None)
    changed.pop("prefetch", None)
    return {**sizes, **changed}


def policy_json(policy: ModelCachePolicy) -> dict[str, Any]:
    """The policy as plain values."""
    values = {field.name: getattr(policy, field.name) for field in fields(policy)}
    return {
        name: sorted(value) if isinstance(value, frozenset) else value
        for name, value in values.items()
    }


def policy_of(data: Mapping[str, Any]) -> ModelCachePolicy:
    """The policy of plain values."""
    values: dict[str, Any] = {
        name: frozenset(value) if isinstance(value, list) else value for name, value in data.items()
    }
    return ModelCachePolicy(**values)


def delivered_sha256(
    out: StageOutputs,
    req_ids: tuple[str, ...],
    on_host: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows,
) -> str:
    """One hash of everything that these requests got: spans, layouts, bytes, leftovers."""
    digest = hashlib.sha256()
    outputs: dict[str, Mapping[str, object]] = dict(out.mm_outputs)
    if out.hidden_states is not None:
        outputs[HIDDEN_KEY] = out.hidden_states
    for req_id in req_ids:
        digest.update(f"{req_id} {out.spans[req_id]}\n".encode())
        for key in sorted(outputs):
            if req_id in outputs[key]:
                span = out.key_spans[key][req_id] if key in out.key_spans else ""
                digest.update(f"{key} {span} ".encode())
                value = outputs[key][req_id]
                _add(digest, on_host(value) if isinstance(value, torch.Tensor) else value)
    return digest.hexdigest()


def _add(digest: hashlib._Hash, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        digest.update(f"{value!r}\n".encode())
        return
    digest.update(f"{value.dtype} {tuple(value.shape)}\n".encode())
    if value.numel():
        digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def _page_stamps(step: RecordedStep) -> Stamps:
    events = step.events
    runs = zip(events.req_ids, step.stamps, events.num_tokens.tolist(), strict=True)
    stamps = {req_id: np.arange(first, first + count) for req_id, first, count in runs}
    return np.concatenate([stamps[name] for name in step.order])
