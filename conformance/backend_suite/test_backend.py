"""What `pytest --pyargs slotmirror.conformance --backend NAME` collects."""

from __future__ import annotations

from slotmirror.conformance.backend_suite import selection
from slotmirror.conformance.backend_suite.suite import BackendConformance


class TestBackend(BackendConformance):
    """The kit on the backend that the command names."""

    backend_name = selection.backend_name
