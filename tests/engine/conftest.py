"""A tiny model for the engine's tests."""

from pathlib import Path

import pytest

from tests.tiny import llama_config, random_model, save_gguf


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file of a Llama with random weights."""
    return save_gguf(
        random_model(llama_config(tie_word_embeddings=False)),
        tmp_path_factory.mktemp("tiny") / "tiny.gguf",
    )
