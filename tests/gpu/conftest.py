"""Tests on a GPU find machine code that other processes compiled; each may run a part of them."""

import pytest
import torch

from tests.gpu.kept import keep_code
from tests.gpu.parts import keep_part


@pytest.hookimpl(trylast=True)  # when the marks have had their say
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave this process its part."""
    config.hook.pytest_deselected(items=keep_part(items))


@pytest.fixture(autouse=True, scope="session")
def _kept_code() -> None:
    if torch.cuda.is_available():
        keep_code()
