from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integrations.sglang.cpu_engine.client import ForkServer


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """SGLang's real engine on the CPU; each call runs in a process of its own."""
    if find_spec("sglang") is None:
        pytest.skip("SGLang is not installed: run make test-sglang")
    with ForkServer(tmp_path_factory.mktemp("sglang")) as running:
        yield running


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for checkpoints, made when they are asked for."""
    return tmp_path_factory.mktemp("models")
