"""What the whole suite shares: the default model, pulled once into the user's cache."""

import gc
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tests.interpreter  # noqa: F401  # before anything imports triton
from headroom.formats.hub import pull
from headroom.options import load_options

try:  # a machine that runs the GPU's tests alone may lack it
    from hypothesis import settings
except ImportError:
    pass
else:  # how long an example takes is a matter of what else the machine does
    settings.register_profile("untimed", deadline=None)
    settings.load_profile("untimed")

if "MUTANT_UNDER_TEST" in os.environ:  # mutmut puts two frames of its own into every call
    sys.setrecursionlimit(3 * sys.getrecursionlimit())


def pytest_sessionstart() -> None:
    """Look for no garbage while everything is imported and nothing is dropped."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Let no later search for garbage look at the million objects of imported packages."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """Let the end find everything, or the C++ module would report leaks."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file."""
    return pull("", load_options({}).home_path)


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file of a Llama with random weights, its head apart from its embedding."""
    # Not above: a machine that runs the GPU's tests alone may lack what these need.
    from tests.tiny import llama_config, random_model, save_gguf

    model = random_model(llama_config(tie_word_embeddings=False))
    return save_gguf(model, tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(autouse=True)
def _logs_as_they_were() -> Iterator[None]:
    """Undo what a command did to the package's logger, so that later tests see its lines."""
    yield
    logger = logging.getLogger("headroom")
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def _no_aliases_by_chance(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Let names of models mean the same whatever aliases the user has."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.getbasetemp() / "config"))


@pytest.fixture(autouse=True)
def _no_models_by_chance(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Let no test find the models that other programs have on this machine."""
    none = tmp_path_factory.getbasetemp() / "none"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(none))
    monkeypatch.setattr("headroom.formats.other_stores.user_home", lambda: none)


@pytest.fixture(autouse=True)
def _no_gpu_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tests run on the CPU unless they name a device, whatever machine they run on."""
    monkeypatch.setattr("headroom.split.choice.detect_gpus", list)
