"""The engine's ranks as Ray actors. Outside `make e2e`: `make e2e-ray`, which adds Ray."""

from __future__ import annotations

import pytest


@pytest.mark.scenario("tensor_parallel_on_ray")
def test_rows_are_kept_once_among_ray_actors(facts):
    """On the first rank alone, in whole files of the model's rows."""
    assert facts["kept_on"] == [0]
    assert facts["not_whole"] == []
    assert facts["stats"]["cache"]["hits"] > 0
    assert facts["stats"]["delivery"]["requests_missing_rows"] == 0
    assert facts["worst"] <= 5e-6
