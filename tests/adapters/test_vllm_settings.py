"""The operator's settings, from the engine's configuration and the environment."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from slotmirror.adapters.vllm import platform_worker
from slotmirror.adapters.vllm.layer_rows import LayerRows
from slotmirror.adapters.vllm.open_mirror import open_mirror
from slotmirror.adapters.vllm.settings import read_settings
from slotmirror.core.errors import ConfigError
from support.vllm_fakes import FakeRunner, PlainWorker, kv_cache_config, vllm_config

FILES = {"sink": "files", "folder": "rows"}


def read(settings, environment=""):
    return read_settings({"slotmirror": settings}, {"SLOTMIRROR_VLLM": environment})


def test_defaults():
    """Only the sink and its place must be said."""
    settings = read(FILES)
    assert (settings.deliver, settings.when_full, settings.layers) == ("prompt", "block", ())


def test_the_environment_wins_key_by_key():
    """And is enough alone, as for an engine whose command line is not ours."""
    settings = read(FILES, '{"folder": "other", "layers": [1, 3]}')
    assert (settings.folder, settings.layers) == ("other", (1, 3))
    alone = read_settings(None, {"SLOTMIRROR_VLLM": '{"sink": "shared_memory", "name": "x"}'})
    assert alone.name == "x"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, "sink"),
        ({"sink": "kafka"}, "sink"),
        ({"sink": "files"}, "folder"),
        ({"sink": "shared_memory"}, "name"),
        ({"sink": "callback"}, "callback"),
        (FILES | {"colour": 1}, "colour"),
        (FILES | {"deliver": "some"}, "deliver"),
        (FILES | {"when_full": "wait"}, "when_full"),
        (FILES | {"layers": 3}, "layers"),
        (FILES | {"layers": [-1]}, "layers"),
        (FILES | {"layers": [True]}, "layers"),
        (FILES | {"queue_bytes_max": 0}, "queue_bytes_max"),
        (FILES | {"block_timeout_s": "long"}, "block_timeout_s"),
        (FILES | {"debug_slots": 1}, "debug_slots"),
        (FILES | {"cache": 7}, "cache"),
        ([], "slotmirror"),
    ],
)
def test_a_wrong_setting_is_named(settings, named):
    """Its name and value are in the error."""
    with pytest.raises(ConfigError) as caught:
        read(settings)
    assert caught.value.field == named


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_wrong_environment_is_named(text):
    """The variable's name, not a parser's."""
    with pytest.raises(ConfigError, match="SLOTMIRROR_VLLM"):
        read(FILES, text)


def test_the_cache_is_open_to_the_operator(tmp_path):
    """Fields of the core's configuration pass through; an unknown one is refused by name."""
    settings = read({"sink": "files", "folder": str(tmp_path), "cache": {"staging_depht": 9}})
    with pytest.raises(ConfigError, match="staging_depht"):
        open_mirror(settings, vllm_config({}), kv_cache_config(), FakeRunner())


class Pairs(nn.Module):
    """A decoder layer as vLLM's: it returns output and residual, and later works in place."""

    def forward(self, hidden, residual):
        residual += hidden
        return hidden * 2, residual


class Decoder(nn.Module):
    def __init__(self, layer=Pairs):
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(3))

    def forward(self, hidden):
        residual = torch.zeros_like(hidden)
        for layer in self.layers:
            hidden, residual = layer(hidden, residual)
        return hidden


def test_a_layer_is_what_it_hands_on():
    """The sum of output and residual at that layer, although the next one overwrites both."""
    model = Decoder()
    rows = LayerRows(model, (0, 2))
    model(torch.ones(4, 2))
    rows.start()
    model(torch.ones(4, 2))
    got = rows.stop()
    assert {key: tensor[0, 0].item() for key, tensor in got.items()} == {
        "hidden_states.layer_0": 3.0,
        "hidden_states.layer_2": 15.0,
    }
    rows.remove()
    model(torch.ones(4, 2))
    assert rows.stop() == {}


@pytest.mark.parametrize("model", [nn.Linear(2, 2), Decoder()])
def test_a_layer_that_the_model_lacks_is_named(model):
    """A model without a stack, and a number beyond it."""
    with pytest.raises(ConfigError, match="layers="):
        LayerRows(model, (3,))


@pytest.mark.parametrize(
    "change",
    [{"model_config__enforce_eager": False}, {"parallel_config__pipeline_parallel_size": 2}],
)
def test_layers_are_refused_where_hooks_do_not_run(tmp_path, change):
    """Compiled models and other pipeline ranks; no thread was started."""
    settings = read({"sink": "files", "folder": str(tmp_path), "layers": [0]})
    with pytest.raises(ConfigError, match="layers="):
        open_mirror(settings, vllm_config({}, **change), kv_cache_config(), FakeRunner())


def test_no_engine_is_imported():
    """The package and everything but the class itself import without one."""
    code = (
        "import sys, slotmirror.adapters.vllm, slotmirror.adapters.vllm.worker_mixin\n"
        "assert not [m for m in sys.modules if m.split('.')[0] in ('vllm', 'vllm_ascend')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.fixture
def named_worker(monkeypatch):
    platform_worker.worker_class.cache_clear()
    yield lambda name: monkeypatch.setenv("SLOTMIRROR_VLLM_WORKER", name)
    platform_worker.worker_class.cache_clear()


def test_the_worker_goes_over_the_platforms(named_worker, monkeypatch):
    """A subclass of the named worker, the same at every call, found as vLLM looks it up."""
    import slotmirror.adapters.vllm as package

    monkeypatch.setattr(platform_worker, "_import", {"a.Worker": PlainWorker}.__getitem__)
    named_worker("a.Worker")
    assert issubclass(package.Worker, PlainWorker)
    assert package.Worker is package.Worker
    with pytest.raises(AttributeError, match="Wroker"):
        package.Wroker  # noqa: B018


@pytest.mark.parametrize("name", ["no.such.Worker", "os.path.Worker", "os.sep", "Worker"])
def test_a_worker_that_cannot_be_imported_is_named(named_worker, name):
    """The variable and what it says."""
    named_worker(name)
    with pytest.raises(ConfigError, match="SLOTMIRROR_VLLM_WORKER"):
        platform_worker.worker_class()
