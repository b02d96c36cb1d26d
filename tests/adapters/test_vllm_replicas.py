"""Data-parallel replicas of one deployment: what they deliver never meets (G3)."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from slotmirror.adapters.delivery.file_sink import read_rows, request_files
from slotmirror.adapters.delivery.request_rows import RequestRows
from slotmirror.adapters.vllm.open_mirror import make_sink, replica_name
from slotmirror.adapters.vllm.settings import read_settings


def request(value: float) -> RequestRows:
    """One request; every replica has one of this id."""
    rows = {"hidden_states": torch.full((3, 2), value)}
    return RequestRows("0", 3, rows, {"hidden_states": 0})


@pytest.mark.parametrize(
    ("parallel", "name"),
    [
        ({"data_parallel_index": 1, "data_parallel_rank": 0}, "dp1"),
        ({"data_parallel_rank": 2}, "dp2"),
        ({}, "dp0"),
    ],
)
def test_replicas_are_told_apart_by_index(parallel, name):
    """The rank of a dense model's replicas is 0 for all; releases without the index have a rank."""
    assert replica_name(SimpleNamespace(**parallel)) == name


def test_replicas_share_a_folder_of_files(tmp_path):
    """The same id from two replicas makes two files."""
    settings = read_settings({"slotmirror": {"sink": "files", "folder": str(tmp_path)}})
    for number in range(2):
        make_sink(settings, f"dp{number}").write(request(float(number)))
    values = [
        float(read_rows(path).rows["hidden_states"][0, 0]) for path in request_files(tmp_path)
    ]
    assert sorted(values) == [0.0, 1.0]


def test_replicas_share_a_name_of_shared_memory():
    """Both live at once under one configured name, each with a folder of its own."""
    name = f"test-replicas-{os.getpid()}"
    settings = read_settings({"slotmirror": {"sink": "shared_memory", "name": name}})
    sinks = [make_sink(settings, f"dp{number}") for number in range(2)]
    folders = {sink.folder for sink in sinks}
    for sink in sinks:
        sink.close()
    assert len(folders) == 2
