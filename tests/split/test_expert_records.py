"""Settings of experts are read before anything is loaded, and refused there."""

from pathlib import Path

import pytest

from headroom.errors import FormatError, OptionError
from headroom.formats.checkpoint import open_checkpoint
from headroom.models.describe import ModelDescription, describe
from headroom.moe.swap import SwapPolicy
from headroom.options import Options
from headroom.split.expert_records import UpkeepRules, read_records, upkeep_rules
from tests.synth_models import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelDescription:
    return describe(open_checkpoint(write_model("laguna", "q8_0", tmp_path_factory.mktemp("m"))))


def test_settings_become_rules() -> None:
    options = Options(
        swap_every="64",
        swap_bytes="1MiB",
        swap_min_gain=3,
        swap_per_layer=5,
        save_placement="placed.json",
    )
    assert upkeep_rules(options) == UpkeepRules(
        swap_every=64,
        policy=SwapPolicy(min_gain=3, per_layer=5, most_bytes=1 << 20),
        placement_path=Path("placed.json"),
    )
    assert upkeep_rules(Options()).swap_every == 0
    assert upkeep_rules(Options(swap_every="off")).swap_every is None


def test_a_placement_is_saved_in_a_folder_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    rules = upkeep_rules(Options(save_placement="~/placed.json"))
    assert rules.placement_path == tmp_path / "placed.json"
    with pytest.raises(OptionError) as refused:
        upkeep_rules(Options(save_placement="~/nowhere/placed.json"))
    assert str(refused.value) == (
        f"--save-placement {tmp_path}/nowhere/placed.json is in a folder that does not exist. "
        "Make the folder, or name another file."
    )


@pytest.mark.parametrize("text", ["", "-1", "1.5", "never"])
def test_a_number_of_tokens_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(OptionError) as refused:
        upkeep_rules(Options(swap_every=text))
    assert str(refused.value) == (
        f"--swap-every is {text!r}. Write a number of tokens, 0 for swaps only between requests, "
        "or off."
    )


def test_bytes_of_swaps_that_are_no_size_are_refused_by_name() -> None:
    with pytest.raises(OptionError, match=r"--swap-bytes is 'much', which is not") as refused:
        upkeep_rules(Options(swap_bytes="much"))
    assert refused.value.param == "swap_bytes"


def test_records_know_the_models_layers(model: ModelDescription, tmp_path: Path) -> None:
    records = read_records(model, Options(home=str(tmp_path)))
    layers = model.shape.layers
    assert [layer.experts for layer in records.model.layers] == [x.experts for x in layers]
    assert records.model.layers[0].experts == 0  # a dense one
    assert records.file.path == model.checkpoint.path.with_name(
        model.checkpoint.path.name + ".routing.json"
    )


def test_measuring_saves_and_swaps_nothing(model: ModelDescription, tmp_path: Path) -> None:
    options = Options(home=str(tmp_path), save_placement="placed.json", swap_every="5")
    records = read_records(model, options, measuring=True)
    assert records.file.path is None
    assert (records.rules.swap_every, records.rules.placement_path) == (None, None)


def test_a_named_file_of_another_model_is_refused(model: ModelDescription, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"version": 1, "model": "other", "saved_at": 0, "counts": []}')
    with pytest.raises(FormatError, match="is of another model"):
        read_records(model, Options(routing_stats=str(path)))


def test_a_placement_is_saved_over_placements_alone(
    model: ModelDescription, tmp_path: Path
) -> None:
    path = tmp_path / "placed.json"
    path.write_text('{"version": 1, "model": "other", "hot": []}')
    options = Options(home=str(tmp_path), save_placement=str(path))
    assert read_records(model, options).rules.placement_path == path
    path.write_text('{"version": 1, "model": "other", "counts": []}')
    with pytest.raises(OptionError, match="is there and is not a placement file"):
        read_records(model, options)
    own = model.checkpoint.path
    with pytest.raises(OptionError) as refused:
        read_records(model, Options(home=str(tmp_path), save_placement=str(own)))
    assert str(refused.value) == (
        f"{own} is a file of the model; it is not written over. Name another file with "
        "--save-placement."
    )
