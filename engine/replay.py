"""Replay of a trace through the two-stage pipeline, with every output verified."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

from slotmirror.core.registry import load_backend
from slotmirror.engine.pipeline import Pipeline
from slotmirror.engine.pipeline_types import (
    PipelineConfig,
    PipelineOutput,
    PipelineRequest,
    PipelineResult,
)
from slotmirror.engine.replay_options import ReplayOptions
from slotmirror.engine.replay_report import ReplayReport, Run, library_versions
from slotmirror.engine.traces import TraceRequest, detect_format, read_requests
from slotmirror.engine.verify import Verifier, VerifyReport, verify_outputs

ProgressListener: TypeAlias = Callable[[str, int, int], None]
"""Called with the name of the run, the requests done and all requests, on the calling thread."""

WITH_CACHING = "with caching"
WITHOUT_CACHING = "without caching"


def ignore_progress(run: str, done: int, total: int) -> None:
    """A listener that does not care."""


def replay_trace(
    path: Path, options: ReplayOptions, progress: ProgressListener = ignore_progress
) -> ReplayReport:
    """Serve the requests of a chat file or Mooncake trace, verify them, and report.

    A turn of a conversation starts when the former turn has left the pipeline. A second run,
    with caching off, follows where verification or `compare` asks for it.

    Raises:
        TraceError: the file or one of its lines is unusable.
        RequestError: a setting or a request cannot be served.
        BackendError: the backend is missing or unavailable.
    """
    backend = load_backend(options.backend).name
    config = options.pipeline_config(backend)
    requests = [_pipeline_request(request) for request in read_requests(path, options.read)]
    cached, reference, verified = (
        _run_against_reference(config, requests, progress)
        if options.verifies_by_reference
        else _run_streaming(config, requests, options, progress)
    )
    return ReplayReport(
        path=path,
        format=detect_format(path),
        options=options,
        versions=library_versions(backend),
        backend=backend,
        requests=len(requests),
        with_caching=cached,
        without_caching=reference,
        verified=verified,
    )


class _TimedVerifier:
    """Verifies outputs as they leave the pipeline, so that none is kept; counts its own time."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier
        self.seconds = 0.0

    def add(self, output: PipelineOutput) -> None:
        start = time.perf_counter()
        self._verifier.add(output)
        self.seconds += time.perf_counter() - start


def _run_against_reference(
    config: PipelineConfig, requests: Sequence[PipelineRequest], progress: ProgressListener
) -> tuple[Run, Run, VerifyReport]:
    """Both runs; the outputs of the first must be those of the second.

    The second decodes the tokens of the first: one rounding difference would otherwise send the
    two on different texts.
    """
    cached = _run(config, requests, partial(progress, WITH_CACHING))
    reference = _run(
        config.caching_off(), requests, partial(progress, WITHOUT_CACHING), forced=cached.outputs
    )
    verified = verify_outputs(config, cached.outputs.values(), reference.outputs)
    return Run.of(cached), Run.of(reference), verified


def _run_streaming(
    config: PipelineConfig,
    requests: Sequence[PipelineRequest],
    options: ReplayOptions,
    progress: ProgressListener,
) -> tuple[Run, Run | None, VerifyReport | None]:
    """The run, verified by formula if at all, and one with caching off if it is to be timed.

    Keeps no outputs, so that a trace of any length fits.
    """
    verifier = Verifier(config) if options.verify else None
    timed = None if verifier is None else _TimedVerifier(verifier)
    cached = _run(
        config,
        requests,
        partial(progress, WITH_CACHING),
        on_output=_drop if timed is None else timed.add,
    )
    seconds_verifying = 0.0 if timed is None else timed.seconds
    reference = None
    if options.compare:
        off = _run(
            config.caching_off(), requests, partial(progress, WITHOUT_CACHING), on_output=_drop
        )
        reference = Run.of(off)
    verified = None if verifier is None else verifier.report()
    return Run.of(cached, seconds_verifying), reference, verified


def _run(
    config: PipelineConfig,
    requests: Sequence[PipelineRequest],
    progress: Callable[[int, int], None],
    on_output: Callable[[PipelineOutput], None] | None = None,
    forced: Mapping[str, PipelineOutput] | None = None,
) -> PipelineResult:
    with Pipeline(config) as pipeline:
        return pipeline.run(requests, progress=progress, on_output=on_output, forced=forced)


def _drop(output: PipelineOutput) -> None:
    """Outputs that nobody looks at are not kept."""


def _pipeline_request(request: TraceRequest) -> PipelineRequest:
    return PipelineRequest(
        req_id=request.request_id,
        token_ids=request.prompt_token_ids,
        max_tokens=request.output_tokens_max,
        after=request.after,
    )
