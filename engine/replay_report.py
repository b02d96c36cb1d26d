"""What a replay found, with stable names for machines."""

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from slotmirror.core.registry import list_backends
from slotmirror.engine.pipeline_types import STAGES, PipelineResult, StageReport
from slotmirror.engine.replay_options import ReplayOptions
from slotmirror.engine.traces import TraceFormat
from slotmirror.engine.verify import VerifyReport

REPORT_VERSION = 1
"""Of the JSON report; raised when a name changes its meaning or goes."""

_LIBRARIES = ("slotmirror", "torch", "numpy", "stevedore")


@dataclass(frozen=True, slots=True)
class Run:
    """One pass of the trace through the pipeline.

    Attributes:
        serving_seconds: wall time, without the time that verification took in between.
        stages: counters by stage name.
    """

    serving_seconds: float
    stages: Mapping[str, StageReport]

    @classmethod
    def of(cls, result: PipelineResult, seconds_verifying: float = 0.0) -> "Run":
        """The pass that the pipeline reports."""
        return cls(result.wall_seconds - seconds_verifying, result.stages)


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """Everything that `slotmirror replay` shows.

    Attributes:
        backend: the device backend that served, as given or as chosen.
        versions: of Python, the libraries and the backend's distribution.
        without_caching: the second run, if there was one.
        verified: None when verification was off.
    """

    path: Path
    format: TraceFormat
    options: ReplayOptions
    versions: Mapping[str, str]
    backend: str
    requests: int
    with_caching: Run
    without_caching: Run | None
    verified: VerifyReport | None

    @property
    def ok(self) -> bool:
        """No mismatch, and where verification was on, every request was looked at."""
        if self.verified is None:
            return True
        return self.verified.ok and self.verified.requests == self.requests

    @property
    def speedup(self) -> float | None:
        """Time without caching over time with it."""
        if self.without_caching is None:
            return None
        return self.without_caching.serving_seconds / self.with_caching.serving_seconds

    def to_json(self) -> dict[str, object]:
        """The report as plain values."""
        return {
            "report_version": REPORT_VERSION,
            "file": self.path.name,
            "format": str(self.format),
            "options": asdict(self.options),
            "backend": self.backend,
            "versions": dict(self.versions),
            "requests": self.requests,
            "ok": self.ok,
            "speedup": self.speedup,
            "with_caching": _run_json(self.with_caching),
            "without_caching": _run_json(self.without_caching),
            "verified": _verified_json(self.verified),
        }


def library_versions(backend: str) -> dict[str, str]:
    """Versions of Python, of the libraries that the result depends on, and of the backend."""
    providers = {found.distribution for found in list_backends() if found.name == backend}
    names = sorted({*_LIBRARIES, *providers})
    return {"python": platform.python_version(), **{n: metadata.version(n) for n in names}}


def _run_json(run: Run | None) -> dict[str, object] | None:
    if run is None:
        return None
    stages = {name: _stage_json(run.stages[name]) for name in STAGES}
    return {"serving_seconds": run.serving_seconds, "stages": stages}


def _stage_json(stage: StageReport) -> dict[str, object]:
    return {
        **asdict(stage),
        "hit_rate": hit_rate(stage),
        "prefill_tokens_saved": prefill_tokens_saved(stage),
        "host_bytes": host_bytes(stage),
    }


def _verified_json(verified: VerifyReport | None) -> dict[str, object] | None:
    if verified is None:
        return None
    return {
        "outputs": verified.requests,
        "rows": verified.rows_verified,
        "leftovers": verified.leftovers_verified,
        "mismatches": verified.mismatches,
        "first_mismatches": [str(mismatch) for mismatch in verified.first_mismatches],
    }


def hit_rate(stage: StageReport) -> float:
    """Prompt tokens that hits served at first admissions, over all prompt tokens."""
    return stage.hit_tokens / stage.prompt_tokens


def prefill_tokens_saved(stage: StageReport) -> int:
    """Tokens that hits spared: of prompts, and what requests found again after a preemption."""
    return stage.hit_tokens + stage.resumed_hit_tokens


def rows_written(stage: StageReport) -> int:
    """Rows that the stage's cache wrote to its pool, all keys together."""
    return _counter(stage, "rows_written")


def rows_gathered(stage: StageReport) -> int:
    """Rows that the stage's cache read back for hits, all keys together."""
    return _counter(stage, "rows_gathered")


def host_bytes(stage: StageReport) -> dict[str, int]:
    """Host bytes of the stage's cache by class: hit outputs at their highest, others as held."""
    host = {n: held for n, held in stage.memory_stats.items() if not n.endswith("_device_bytes")}
    return {**host, "hit_output_bytes": _counter(stage, "hit_buffer_bytes_high")}


def _counter(stage: StageReport, name: str) -> int:
    value = stage.cache_stats[name]
    if not isinstance(value, int):
        raise TypeError(f"the cache's counter {name!r} is {value!r}, not a number")
    return value
