"""The drop-in for vLLM-Omni's cache, beside the wheel's own and under its runner mixin."""

from __future__ import annotations

import pytest


@pytest.mark.scenario("omni_side_by_side")
def test_the_drop_in_gives_what_the_original_gives(facts):
    """Fifteen traces, every output of every step equal; same names, same parameters."""
    assert facts["differences"] == []
    assert facts["signatures"] == []
    assert facts["names_missing"] == ["HIDDEN_KEY", "OmniPrefixCacheController", "PrefixBlockPool"]
    assert facts["steps"] >= 500
    assert facts["hit_tokens"] >= 5_000


@pytest.mark.scenario("omni_installed")
def test_the_drop_in_under_the_original_mixin(facts):
    """Installed, the wheel's runner mixin builds and drives it; uninstalled, it is as before."""
    assert facts["manager"] == "slotmirror.adapters.vllm_omni.manager"
    assert facts["wrong_rows"] == 0
    assert facts["restored"]
    assert facts["threads_left"] == []
