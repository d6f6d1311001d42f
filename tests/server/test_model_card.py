"""What the server knows about a model without loading it."""

from pathlib import Path
from typing import Any

import pytest

from headroom.errors import FormatError, OptionError
from headroom.options import Options
from headroom.server.model_card import available_bytes, names_of, planned_bytes, read_card
from tests.optional import optional
from tests.tiny import llama_config, random_model, save_gguf

gguf = optional("gguf")

SETTINGS: dict[str, Any] = {"device": "cpu", "context": 256, "parallel": 2, "ram": "2GiB"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    return save_gguf(random_model(llama_config()), folder / "tiny.gguf", "Q8_0")


def test_a_card_has_the_numbers_that_another_reader_finds_in_the_file(path: Path) -> None:
    card = read_card("tiny", path, Options(**SETTINGS))
    reader = gguf.GGUFReader(path)
    assert card.size_bytes == sum(int(tensor.n_bytes) for tensor in reader.tensors)
    assert card.parameters == sum(int(tensor.n_elements) for tensor in reader.tensors)
    assert (card.format, card.family, card.trained_context) == ("gguf", "llama", 512)
    assert card.metadata["llama.block_count"] == 3
    assert card.context == 256
    assert card.error is None


def test_a_model_beside_others_keeps_the_settings_that_it_has_alone(path: Path) -> None:
    options = Options(**{**SETTINGS, "context": None})
    card = read_card("tiny", path, options)
    assert card.plan is not None
    fixed = card.fixed(options)
    assert (fixed.device, fixed.context, fixed.parallel) == ("cpu", 512, 2)
    assert fixed.chunk == card.plan.settings.chunk
    assert fixed.cache_tokens == card.plan.settings.cache_tokens


@pytest.mark.parametrize(
    ("settings", "device"), [({"device": "cpu,cpu"}, "cpu,cpu"), ({"workers": "2"}, "cpu")]
)
def test_a_model_keeps_all_devices_that_share_its_layers(
    path: Path, settings: dict[str, str], device: str
) -> None:
    options = Options(**SETTINGS | settings)
    assert read_card("tiny", path, options).fixed(options).device == device


def test_a_card_counts_what_the_engine_allocates_and_not_what_is_kept_free(path: Path) -> None:
    plan = read_card("tiny", path, Options(**SETTINGS)).plan
    assert plan is not None
    (device,) = plan.devices
    kept = sum(line.bytes for line in device.lines if line.name in ("runtime", "reserve"))
    assert planned_bytes(plan) == {"cpu": sum(line.bytes for line in device.lines) - kept}
    assert available_bytes(plan) == {"cpu": 2 << 30}


def test_a_broken_file_is_an_error_in_the_card(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(60))
    card = read_card("broken", broken, Options(**SETTINGS))
    assert isinstance(card.error, FormatError)
    assert card.context is None


def test_a_wrong_option_is_reported_and_not_taken_for_a_broken_model(path: Path) -> None:
    with pytest.raises(OptionError, match="--ram"):
        read_card("tiny", path, Options(**{**SETTINGS, "ram": "lots"}))


def test_two_models_of_one_name_are_refused(tmp_path: Path) -> None:
    paths = [tmp_path / "a" / "model.gguf", tmp_path / "b" / "Model.gguf"]
    for file in paths:
        file.parent.mkdir()
        file.touch()
    with pytest.raises(OptionError, match="Two models have the name 'model'"):
        names_of(paths, [str(file) for file in paths])
    assert names_of(paths[:1], ["default"]) == ["smollm2-135m-instruct"]
