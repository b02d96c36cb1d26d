"""What a request asks for: adapter, multimodal features, when it ends (spec kv 1.3, 2)."""

from dataclasses import dataclass
from enum import IntEnum, StrEnum

_TOKEN_LEVEL_POOLING_TASKS = frozenset({"token_embed", "token_classify", "plugin"})


class RequestStatus(IntEnum):
    """Life of a request. PAUSED: a session between two turns, holding its blocks."""

    WAITING = 1
    RUNNING = 2
    PREEMPTED = 3
    PAUSED = 4
    FINISHED_STOPPED = 5
    FINISHED_LENGTH_CAPPED = 6
    FINISHED_ABORTED = 7


class FinishReason(StrEnum):
    """Why a request ended, as the front end reports it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
}


@dataclass(frozen=True)
class LoRARequest:
    """An adapter; `version` counts in-place reloads under one name (public issue 42125)."""

    name: str
    path: str = ""
    adapter_id: int = 1
    version: int = 0


@dataclass(frozen=True)
class MultimodalFeature:
    """One multimodal item: its content hash and its placeholder tokens [offset, offset + length).

    `payload` is opaque: whatever the encoder needs.
    """

    identifier: str
    offset: int
    length: int
    payload: object = None

    def __post_init__(self) -> None:
        if self.offset < 0 or self.length < 1:
            raise ValueError(
                f"multimodal feature {self.identifier!r} needs offset >= 0 and length >= 1, "
                f"got offset={self.offset}, length={self.length}"
            )

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True)
class SamplingParams:
    """When generation ends, and whether the prompt must be recomputed for its logprobs."""

    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    prompt_logprobs: int | None = None
    skip_reading_prefix_cache: bool | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {self.max_tokens}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"min_tokens must be between 0 and max_tokens={self.max_tokens}, "
                f"got {self.min_tokens}"
            )

    @property
    def skips_reading(self) -> bool:
        """The explicit wish, else whether prompt logprobs need every prompt token computed."""
        if self.skip_reading_prefix_cache is not None:
            return self.skip_reading_prefix_cache
        return self.prompt_logprobs is not None


@dataclass(frozen=True)
class PoolingParams:
    """A pooling request: it ends with its prompt and samples nothing."""

    task: str = "embed"
    skip_reading_prefix_cache: bool | None = None

    @property
    def skips_reading(self) -> bool:
        """The explicit wish, else whether the task returns one row per prompt token."""
        if self.skip_reading_prefix_cache is not None:
            return self.skip_reading_prefix_cache
        return self.task in _TOKEN_LEVEL_POOLING_TASKS
