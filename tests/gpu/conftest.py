"""A device for the tests of this folder. AV_TRITON_GPU_DRY_RUN=1: the CPU, with the kernels in the interpreter."""

import os

import pytest
import torch

DRY = os.environ.get("AV_TRITON_GPU_DRY_RUN") == "1"


@pytest.fixture
def device():
    if torch.cuda.is_available():
        return torch.device("cuda")
    if DRY:
        return torch.device("cpu")
    return pytest.skip("no GPU")


@pytest.fixture
def cuda():
    """For what only a real device has: graphs, streams, its allocator."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    return torch.device("cuda")


@pytest.fixture
def full(device):
    """Full sizes on a device, small ones in the interpreter."""
    return device.type == "cuda"
