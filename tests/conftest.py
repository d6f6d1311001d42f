"""What the whole suite shares: the default model, pulled once into the user's cache."""

from pathlib import Path

import pytest

from headroom.formats.hub import pull
from headroom.options import load_options


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file."""
    return pull("", load_options({}).home_path)
