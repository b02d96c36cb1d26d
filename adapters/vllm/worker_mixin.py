"""The hooks over a vLLM worker; nothing of the engine is patched.

Every method calls `super()`, whatever the platform's worker does there.
"""

from __future__ import annotations

from typing import Any

from slotmirror.adapters.vllm.mirror import StageMirror
from slotmirror.adapters.vllm.open_mirror import open_mirror
from slotmirror.adapters.vllm.settings import AdapterSettings, read_settings


class StageMirrorMixin:
    """To be placed before a worker class of vLLM or vllm-ascend.

    `execute_model` sees the scheduler's output before the engine's own states are updated, and the
    hidden states after the forward, until `sample_tokens`. Warm-up and capture are not fed (C4):
    they reach the model runner directly, except what `compile_or_warm_up_model` runs through
    `execute_model`.
    """

    _slotmirror: StageMirror | None = None
    _slotmirror_settings: AdapterSettings | None = None
    _slotmirror_warming_up = False

    # Of the worker beside which this class stands.
    vllm_config: Any
    model_runner: Any

    def init_device(self) -> None:
        """Settings are read before anything costly is done, so that a wrong one shows at once."""
        self._slotmirror_settings = read_settings(self.vllm_config.additional_config)
        super().init_device()  # type: ignore[misc]

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """The engine has sized its KV cache, so the mirror can be sized (K2)."""
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        self._slotmirror_close()
        settings = self._slotmirror_settings
        if settings is not None and self._slotmirror_keeps_rows():
            self._slotmirror = open_mirror(
                settings, self.vllm_config, kv_cache_config, self.model_runner
            )

    def compile_or_warm_up_model(self) -> Any:
        """Nothing that runs in here is a step."""
        self._slotmirror_warming_up = True
        try:
            return super().compile_or_warm_up_model()  # type: ignore[misc]
        finally:
            self._slotmirror_warming_up = False

    def execute_model(self, scheduler_output: Any) -> Any:
        """One step: its events before, its rows after."""
        mirror = None if self._slotmirror_warming_up else self._slotmirror
        if mirror is None:
            return super().execute_model(scheduler_output)  # type: ignore[misc]
        mirror.step_starts(scheduler_output)
        result = super().execute_model(scheduler_output)  # type: ignore[misc]
        mirror.forward_done(self.model_runner.execute_model_state, self.model_runner)
        return result

    def sample_tokens(self, grammar_output: Any) -> Any:
        """The accepted drafts are known here, whatever becomes of the request (L7)."""
        result = super().sample_tokens(grammar_output)  # type: ignore[misc]
        if self._slotmirror is not None and not self._slotmirror_warming_up:
            self._slotmirror.sampled(result)
        return result

    def sleep(self, *args: Any, **kwargs: Any) -> Any:
        """The engine forgets its KV, so rows are forgotten (R1)."""
        self._slotmirror_forget()
        return super().sleep(*args, **kwargs)  # type: ignore[misc]

    def reload_weights(self, *args: Any, **kwargs: Any) -> Any:
        """Rows of the old weights are forgotten (R1)."""
        self._slotmirror_forget()
        return super().reload_weights(*args, **kwargs)  # type: ignore[misc]

    def update_weights(self, *args: Any, **kwargs: Any) -> Any:
        """Rows of the old weights are forgotten (R1)."""
        self._slotmirror_forget()
        return super().update_weights(*args, **kwargs)  # type: ignore[misc]

    def shutdown(self) -> None:
        """Deliver what is whole, end the threads, then let the worker go."""
        try:
            self._slotmirror_close()
        finally:
            super().shutdown()  # type: ignore[misc]

    def slotmirror_flush(self, timeout_s: float = 60.0, end_requests: bool = False) -> None:
        """Wait until all whole requests are with their sink; by `collective_rpc`.

        `end_requests` says that the engine is idle: a worker hears of the end of a request only
        with the next step, so with `deliver="all"` the last ones would wait for it.
        """
        if self._slotmirror is not None:
            self._slotmirror.flush(timeout_s, end_requests=end_requests)

    def slotmirror_stats(self) -> dict[str, object] | None:
        """Counters of cache, delivery and sink; None on ranks that keep no rows."""
        return None if self._slotmirror is None else self._slotmirror.stats()

    def _slotmirror_keeps_rows(self) -> bool:
        """The last pipeline rank and the first tensor-parallel rank: one replica (G3)."""
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        return bool(get_pp_group().is_last_rank and get_tp_group().rank_in_group == 0)

    def _slotmirror_forget(self) -> None:
        if self._slotmirror is not None:
            self._slotmirror.reset()

    def _slotmirror_close(self) -> None:
        mirror, self._slotmirror = self._slotmirror, None
        if mirror is not None and self._slotmirror_settings is not None:
            mirror.shutdown(self._slotmirror_settings.shutdown_timeout_s)
