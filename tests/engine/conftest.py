"""The model that most engines here run."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_llama import write_tiny_llama


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny_llama"))
