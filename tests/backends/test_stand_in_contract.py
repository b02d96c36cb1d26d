"""What the stand-in modules offer exists in the real ones: names, parameters, defaults.

Tests without hardware are worth what their stand-in is worth: a name that torch does not have, or
a default that it does not give, would let a backend pass here and fail on a device.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.stand_in.device import StandInDevice
from support.stand_in.surfaces import (
    Accelerator,
    CudaModule,
    DeviceModule,
    NpuModule,
    TorchModule,
)
from support.torch_npu_sources import (
    NotReachable,
    NpuSources,
    methods_of,
    parameters_of,
    wheel_for_this_torch,
)


def public(offered: object) -> dict[str, Any]:
    """The names that a stand-in offers, functions and classes."""
    names = {name for name in dir(offered) if not name.startswith("_")} - {"runtime"}
    return {name: getattr(offered, name) for name in sorted(names)}


def offered_parameters(member: Callable[..., object]) -> dict[str, object]:
    """Parameter → default of a stand-in's function, or of the call that makes its class."""
    maker = member.__init__ if inspect.isclass(member) else member
    parameters = inspect.signature(maker).parameters.values()
    return {p.name: p.default for p in parameters if p.name != "self"}


def offered_methods(member: object) -> set[str]:
    """Methods of a stand-in's class that backends may call."""
    if not inspect.isclass(member):
        return set()
    return {name for name in dir(member) if not name.startswith("_")} - {"owner"}


CUDA = public(CudaModule(StandInDevice()))
NPU = public(NpuModule(StandInDevice()))
GENERIC = public(TorchModule(StandInDevice()))
ACCELERATOR = public(Accelerator(StandInDevice()))


def test_the_stand_in_offers_what_is_used() -> None:
    """The lists below are not empty, and npu offers what cuda does but for `cudart`."""
    assert {"Event", "Stream", "current_stream", "set_device", "stream"} <= set(NPU)
    assert set(CUDA) == set(NPU) | {"cudart"}
    assert set(public(DeviceModule(StandInDevice()))) == set(NPU)


@pytest.mark.parametrize("name", CUDA)
def test_torch_cuda_has_the_name_its_parameters_and_defaults(name: str) -> None:
    """By introspection of the installed torch; its CPU build has the same Python layer."""
    real = getattr(torch.cuda, name)
    maker = real.__new__ if inspect.isclass(real) else real
    parameters = inspect.signature(maker).parameters
    for parameter, default in offered_parameters(CUDA[name]).items():
        assert parameter in parameters, f"torch.cuda.{name} has no {parameter}"
        assert parameters[parameter].default == default
    assert offered_methods(CUDA[name]) - {"is_capturing"} <= set(dir(real))


@pytest.fixture(scope="module")
def npu_sources(request: pytest.FixtureRequest) -> NpuSources:
    """torch_npu's sources, where its wheel can be had."""
    cache = request.config.cache
    assert cache is not None
    try:
        return NpuSources(wheel_for_this_torch(cache.mkdir("torch_npu")))
    except NotReachable as error:
        pytest.skip(f"torch_npu's wheel cannot be downloaded: {error}")


@pytest.mark.parametrize("name", NPU)
def test_torch_npu_has_the_name_its_parameters_and_defaults(
    name: str, npu_sources: NpuSources
) -> None:
    """By the syntax trees of its wheel."""
    node = npu_sources.find(name)
    assert node is not None, f"torch.npu has no {name}"
    parameters = parameters_of(node)
    for parameter, default in offered_parameters(NPU[name]).items():
        assert parameter in parameters, f"torch.npu.{name} has no {parameter}"
        given = None if default is inspect.Parameter.empty else repr(default)
        assert parameters[parameter] == given
    assert offered_methods(NPU[name]) - {"is_capturing"} <= methods_of(node)


def test_a_planted_difference_is_caught(npu_sources: NpuSources) -> None:
    """A name that torch_npu lacks is not found, and parameters are told apart."""
    assert npu_sources.find("current_blue_stream") is None
    node = npu_sources.find("current_stream")
    assert node is not None
    assert parameters_of(node) == {"device": "None"}


@pytest.mark.parametrize("name", ACCELERATOR)
def test_torch_accelerator_has_the_name_and_its_parameters(name: str) -> None:
    """By introspection."""
    parameters = inspect.signature(getattr(torch.accelerator, name)).parameters
    for parameter, default in offered_parameters(ACCELERATOR[name]).items():
        assert parameter in parameters
        assert parameters[parameter].default == default


@pytest.mark.parametrize("name", ["Stream", "Event"])
def test_torch_has_the_generic_class_and_its_methods(name: str) -> None:
    """These are written in C: their parameters stand in the first line of their documentation."""
    real = getattr(torch, name)
    signature = re.search(rf"{name}\((.*?)\)", real.__doc__)
    assert signature is not None
    for parameter in offered_parameters(GENERIC[name]):
        assert parameter in re.split(r"[\s,=]+", signature[1])
    assert offered_methods(GENERIC[name]) <= set(dir(real))
