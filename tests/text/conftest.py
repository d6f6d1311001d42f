"""Tokenizers that several tests of text share."""

from pathlib import Path

import pytest

from headroom.families.files import open_checkpoint
from headroom.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Tokenizer:
    """The default model's tokenizer."""
    return Tokenizer.from_checkpoint(open_checkpoint(smollm2_path))
