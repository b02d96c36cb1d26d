"""The conformance kit: what every device backend must do, as checks that anybody can run.

A backend's author subclasses `BackendConformance`, or runs `pytest --pyargs
slotmirror.conformance --backend NAME`, or `slotmirror conformance NAME --json report.json`.
The parts are imported from where they are: pytest loads its plugin of this package at every start.
"""
