"""Settings of experts are read before anything is loaded, and refused there."""

from pathlib import Path

import pytest

from headroom.errors import FormatError, OptionError
from headroom.families.files import open_checkpoint
from headroom.options import Options
from headroom.plan.describe import ModelDescription, describe
from headroom.split.expert_records import read_records
from tests.synth_models import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelDescription:
    return describe(open_checkpoint(write_model("laguna", "q8_0", tmp_path_factory.mktemp("m"))))


def test_records_know_the_models_layers(model: ModelDescription, tmp_path: Path) -> None:
    records = read_records(model.checkpoint, model.shape, Options(home=str(tmp_path)))
    layers = model.shape.layers
    assert [layer.experts for layer in records.model.layers] == [x.experts for x in layers]
    assert records.model.layers[0].experts == 0  # a dense one
    assert records.file.path == model.checkpoint.path.with_name(
        model.checkpoint.path.name + ".routing.json"
    )


def test_measuring_saves_and_exchanges_nothing(model: ModelDescription, tmp_path: Path) -> None:
    options = Options(home=str(tmp_path), save_placement="placed.json", swap_every="5")
    records = read_records(model.checkpoint, model.shape, options, measuring=True)
    assert records.file.path is None
    assert (records.rules.swap_every, records.rules.placement_path) == (None, None)


def test_a_named_file_of_another_model_is_refused(model: ModelDescription, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"version": 1, "model": "other", "saved_at": 0, "counts": []}')
    with pytest.raises(FormatError, match="is of another model"):
        read_records(model.checkpoint, model.shape, Options(routing_stats=str(path)))


def test_a_placement_is_saved_over_placements_alone(
    model: ModelDescription, tmp_path: Path
) -> None:
    path = tmp_path / "placed.json"
    path.write_text('{"version": 1, "model": "other", "hot": []}')
    options = Options(home=str(tmp_path), save_placement=str(path))
    assert read_records(model.checkpoint, model.shape, options).rules.placement_path == path
    path.write_text('{"version": 1, "model": "other", "counts": []}')
    with pytest.raises(OptionError, match="is there and is not a placement file"):
        read_records(model.checkpoint, model.shape, options)
    own = model.checkpoint.path
    with pytest.raises(OptionError) as refused:
        read_records(
            model.checkpoint, model.shape, Options(home=str(tmp_path), save_placement=str(own))
        )
    assert str(refused.value) == (
        f"{own} is a file of the model; it is not written over. Name another file with "
        "--save-placement."
    )
