"""The contract of a slotmirror backend, checked on this one."""

from slotmirror.conformance.backend_suite.suite import BackendConformance


class TestThreadCopy(BackendConformance):
    backend_name = "threadcopy"
