import pytest
import torch
import triton


@pytest.fixture(params=["torch", "triton"])
def backend(request, monkeypatch):
    """Each implementation in turn, on CPU tensors; the kernels run in Triton's interpreter."""
    if request.param == "triton" and not triton.knobs.runtime.interpret:
        pytest.skip("kernels on CPU tensors need TRITON_INTERPRET=1")
    monkeypatch.setenv("AV_TRITON_BACKEND", request.param)
    return request.param


@pytest.fixture
def use(monkeypatch):
    """use("torch") or use("triton") from here on in this test."""
    if not triton.knobs.runtime.interpret:
        pytest.skip("kernels on CPU tensors need TRITON_INTERPRET=1")
    return lambda name: monkeypatch.setenv("AV_TRITON_BACKEND", name)


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(20)
