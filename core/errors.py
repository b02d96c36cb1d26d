"""Every error slotmirror raises, and whose fault it is.

    PrefixCacheError
    ├── UsageError (ValueError)            the caller asked for something that cannot be
    │   ├── ConfigError                    a setting is wrong; `.field`, `.value`
    │   │   └── PrefixCacheUnmatchError    the stage cannot be mirrored as it is set up (G2-G4)
    │   ├── KeyLayoutError                 a key changed dtype or trailing shape (D8)
    │   ├── RowLayoutError                 rows, order or counts do not fit the step (S4)
    │   ├── StepTooLargeError              more rows than a staging page holds (S1)
    │   ├── StepStateError (RuntimeError)  a call that the step's state forbids (C4, S2)
    │   │   ├── UnknownStepError (LookupError)
    │   │   └── ReplayOrderError           earlier steps of the owner come first (L3); `.earlier`
    │   ├── RequestNotInStepError (LookupError)   `.req_ids`
    │   ├── HostMemoryLimitError (MemoryError)   `host_memory_limit_bytes`, `hit_buffer_bytes_max`
    │   └── CacheShutDownError (RuntimeError)
    ├── EngineDivergenceError (RuntimeError)     what the engine said contradicts itself or us
    │   ├── HitSpanError                   an unaligned hit, or one without blocks (D4); `.req_id`
    │   ├── UnknownRequestError            a running request that was never new; `.req_ids`
    │   └── MissingRowsError               hidden rows absent on a hit (D5); `.req_ids`
    ├── DeviceError (RuntimeError)         a copy, fence or pool write failed
    │   ├── CacheFailedError               sticky (W5); `.cause`
    │   ├── CopyAbandonedError             a shutdown gave up on the device
    │   └── GatherFailedError              this step alone (W5)
    ├── WaitTimeoutError (TimeoutError)    a bounded wait expired (W6)
    ├── BackendError (RuntimeError)        discovery and abilities of device backends
    │   ├── BackendNotFound (LookupError)  no such backend; `.installed`
    │   ├── BackendUnavailable             installed, but not usable here; `.reason`
    │   ├── BackendLoadError               its module or class failed to load
    │   ├── BackendAmbiguous               several candidates; `.candidates`
    │   └── NotSupported (NotImplementedError)   an ability the backend does not declare
    └── InternalError (RuntimeError)       a bug of ours
        └── IllegalTransitionError         a task move outside the table (W1)

Facts that a caller acts on are attributes as well as text. Errors that are kept (the sticky
failure) are kept without tracebacks, since a traceback's frames would keep device clones and page
buffers alive.
"""

from __future__ import annotations

from collections.abc import Sequence


class PrefixCacheError(Exception):
    """Root of all errors that slotmirror raises on purpose."""


class UsageError(PrefixCacheError, ValueError):
    """Misuse by the caller; the cache's state is as it was before the call."""


class ConfigError(UsageError):
    """A setting has a value that cannot work."""

    def __init__(self, field: str, value: object, rule: str) -> None:
        super().__init__(f"{field}={value!r}: {rule}")
        self.field = field
        self.value = value


class PrefixCacheUnmatchError(ConfigError):
    """A stage asks for prefix caching in a way that the cache cannot mirror (G4)."""


class KeyLayoutError(UsageError):
    """A key's rows differ in dtype or trailing shape from those it was opened with (D8)."""


class RowLayoutError(UsageError):
    """Row counts, row order or slots do not fit the step (S4)."""


class StepTooLargeError(UsageError):
    """A step has more rows than a staging page (S1)."""

    def __init__(self, num_tokens: int, staging_capacity_tokens: int) -> None:
        super().__init__(
            f"this step has {num_tokens} rows, a staging page holds {staging_capacity_tokens}: "
            f"raise staging_capacity_tokens to at least {num_tokens} "
            "(the engine's largest number of batched tokens)"
        )


class StepStateError(UsageError, RuntimeError):
    """A call that the step's state does not allow (C4, S2)."""


class UnknownStepError(StepStateError, LookupError):
    """A step id that was never given out, or that was already consumed (S2)."""

    def __init__(self, step_id: int, reason: str, unconsumed: Sequence[int]) -> None:
        super().__init__(f"step id {step_id} {reason}; unconsumed step ids: {list(unconsumed)}")


class ReplayOrderError(StepStateError):
    """A replayed step was asked for before its owner's earlier steps (L3)."""

    def __init__(self, step_id: int, earlier: Sequence[int], req_ids: Sequence[str]) -> None:
        super().__init__(
            f"step {step_id} replays positions of {list(req_ids)}: materialize or discard their "
            f"earlier steps {list(earlier)} first"
        )
        self.earlier = tuple(earlier)


class RequestNotInStepError(UsageError, LookupError):
    """`materialize` was asked for a request that the step did not contain (S2)."""

    def __init__(self, step_id: int, req_ids: Sequence[str]) -> None:
        super().__init__(f"step {step_id} has no rows of {list(req_ids)}")
        self.req_ids = tuple(req_ids)


class HostMemoryLimitError(UsageError, MemoryError):
    """An allocation would exceed a configured limit (M1, M3); nothing was allocated."""


class CacheShutDownError(UsageError, RuntimeError):
    """The cache was shut down; only a new manager serves (S3)."""


class EngineDivergenceError(PrefixCacheError, RuntimeError):
    """What the engine reported contradicts itself, or what it reported before."""


class HitSpanError(EngineDivergenceError):
    """A hit that is not whole blocks, or lacks the blocks its span needs (D4)."""

    def __init__(self, req_id: str, num_computed_tokens: int, reason: str) -> None:
        super().__init__(f"request {req_id!r}, hit of {num_computed_tokens} tokens: {reason}")
        self.req_id = req_id


class UnknownRequestError(EngineDivergenceError):
    """A request runs or resumes that was never reported as new, or that has ended."""

    def __init__(self, req_ids: Sequence[str], what: str) -> None:
        super().__init__(f"{what}: {list(req_ids)} (not live: never reported as new, or ended)")
        self.req_ids = tuple(req_ids)


class MissingRowsError(EngineDivergenceError):
    """Hidden rows of a hit span are absent (D5). The step stays unconsumed."""

    def __init__(self, step_id: int, missing: Sequence[tuple[str, Sequence[int]]]) -> None:
        detail = "; ".join(f"{req_id!r}: slots {list(slots)[:8]}" for req_id, slots in missing)
        super().__init__(
            f"step {step_id}: the engine reported prefix hits on slots whose hidden rows were "
            f"never saved ({detail}); materialize the step without these requests, or discard it"
        )
        self.req_ids = tuple(req_id for req_id, _ in missing)


class DeviceError(PrefixCacheError, RuntimeError):
    """A copy, a fence or a pool access failed."""


class CacheFailedError(DeviceError):
    """An earlier copy or pool write failed; sticky (W5). Only a new manager serves (R2)."""

    def __init__(self, cause: BaseException, where: str) -> None:
        super().__init__(
            f"the cache has failed and stays failed: {type(cause).__name__}: {cause} (in {where}); "
            "shut this manager down and make a new one"
        )
        self.cause = cause


class CopyAbandonedError(DeviceError):
    """A shutdown gave up waiting for a copy; the memory it uses is never freed (S3)."""


class GatherFailedError(DeviceError):
    """The gather of one step's hit rows failed; other steps are unaffected (W5)."""

    def __init__(self, step_id: int, key: str, cause: BaseException) -> None:
        super().__init__(
            f"step {step_id}: reading the hit rows of {key!r} failed: "
            f"{type(cause).__name__}: {cause}; no row is lost: discard this step"
        )


class WaitTimeoutError(PrefixCacheError, TimeoutError):
    """A bounded wait of a caller expired (W6); the cache is unchanged."""


class BackendError(PrefixCacheError, RuntimeError):
    """Discovery, selection and abilities of device backends."""


class BackendNotFound(BackendError, LookupError):
    """No backend of this name is installed."""

    def __init__(self, name: str, installed: Sequence[str]) -> None:
        super().__init__(
            f"no backend {name!r}; installed: {', '.join(installed) or 'none'} "
            "(set SLOTMIRROR_BACKEND or pass the name of one of these)"
        )
        self.installed = tuple(installed)


class BackendUnavailable(BackendError):
    """The backend is installed but cannot serve on this machine."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"backend {name!r} is unavailable: {reason}")
        self.reason = reason


class BackendLoadError(BackendError):
    """The backend's module or class could not be loaded."""

    def __init__(self, name: str, distribution: str, reason: str) -> None:
        super().__init__(f"backend {name!r} of {distribution} failed to load: {reason}")
        self.reason = reason


class BackendAmbiguous(BackendError):
    """More than one backend could serve, or two distributions offer the same name."""

    def __init__(self, message: str, candidates: Sequence[str]) -> None:
        super().__init__(message)
        self.candidates = tuple(candidates)


class NotSupported(BackendError, NotImplementedError):
    """An optional ability that the backend does not declare."""


class InternalError(PrefixCacheError, RuntimeError):
    """A bug of slotmirror; please report it with the log's tail."""


class IllegalTransitionError(InternalError):
    """A task was moved along an edge that the table does not have (W1)."""


def without_tracebacks(error: BaseException) -> BaseException:
    """`error`, with the tracebacks of its whole chain dropped, fit to be kept.

    A kept traceback keeps every local of its frames alive: device clones, page buffers.
    """
    seen: set[int] = set()
    links: list[BaseException | None] = [error]
    while links:
        link = links.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            link.__traceback__ = None
            links += (link.__cause__, link.__context__)
    return error
