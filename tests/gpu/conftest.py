"""Tests that need an NVIDIA GPU: skipped without one. ``--gpu-device cpu`` runs them on the CPU as far as
they go, with Triton interpreted, so that mistakes in them are not found on a GPU lent by the minute."""

import pytest
import torch
from helpers.gpu_model import OnDevice


def pytest_addoption(parser):
    parser.addoption("--gpu-device", choices=("cuda", "cpu"), default="cuda", help="where tests/gpu runs")


@pytest.fixture(scope="session")
def device(request):
    wanted = request.config.getoption("--gpu-device", "cuda")
    if wanted == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no NVIDIA GPU")
    return torch.device(wanted)


@pytest.fixture(scope="session")
def cuda(device):
    """For what has no meaning elsewhere."""
    if device.type != "cuda":
        pytest.skip("it is about the GPU itself")
    return device


@pytest.fixture(scope="session")
def tiny(device):
    return OnDevice(device.type)


@pytest.fixture(scope="session")
def alone(tiny):
    """What is said to each request alone, one step after another, with nothing recorded."""
    eager = {"enforce_eager": True, "overlap": "off", "prefix_caching": False}
    return [tiny.answers([request], **eager)[0] for request in tiny.requests]
