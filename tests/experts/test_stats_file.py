"""Where routing statistics are kept: beside the model, in the home folder, or in a named file."""

import json
import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest

from headroom.errors import FormatError, OptionError
from headroom.experts import stats
from headroom.experts.placement import LayerExperts
from headroom.experts.stats import (
    HALF_LIFE_S,
    HistoryKeeper,
    RoutingHistory,
    StatsFile,
    StatsModel,
    default_paths,
    load_history,
    open_stats,
    save_history,
)

LAYERS = (LayerExperts(3, 10), LayerExperts(0, 0))
HISTORY = RoutingHistory(((4.0, 0.0, 8.0), ()), 1000.0)


@pytest.fixture
def model(tmp_path: Path) -> StatsModel:
    folder = tmp_path / "models"
    folder.mkdir()
    return StatsModel(folder / "m.gguf", "abc", LAYERS, (2, 0))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def test_statistics_stand_beside_the_model_and_fade(model: StatsModel, home: Path) -> None:
    beside = model.path.parent / "m.gguf.routing.json"
    found = open_stats(None, model, home, 1000.0)
    assert (found.path, found.counts) == (beside, None)
    save_history(beside, HISTORY, "abc")
    found = open_stats(None, model, home, 1000.0 + HALF_LIFE_S)
    assert (found.path, found.counts) == (beside, ((2.0, 0.0, 4.0), ()))


def test_nothing_is_written_into_the_folders_of_other_programs(
    model: StatsModel, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats, "owner_of", lambda path: "ollama")
    assert default_paths(model, home) == (home / "routing" / "m-abc.routing.json",)


def test_where_the_models_folder_cannot_be_written_they_stand_at_home(
    model: StatsModel, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = model.path.parent
    monkeypatch.setattr(
        stats.os, "access", lambda path, mode: locked not in (path, Path(path).parent)
    )
    at_home = home / "routing" / "m-abc.routing.json"
    assert default_paths(model, home)[1] == at_home
    assert open_stats(None, model, home, 0.0).path == at_home
    save_history(at_home, HISTORY, "abc")
    assert open_stats(None, model, home, 1000.0).history == HISTORY
    # A read-only file beside the model is read, and new choices are saved in the home folder.
    save_history(default_paths(model, home)[0], HISTORY.with_choices([[1, 0, 0], []]), "abc")
    found = open_stats(None, model, home, 1000.0)
    assert (found.path, found.history.counts[0][0]) == (at_home, 5.0)


def test_of_two_files_the_one_that_was_saved_last_is_read(
    model: StatsModel, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = model.path.parent
    beside = default_paths(model, home)[0]
    save_history(beside, HISTORY, "abc")
    monkeypatch.setattr(
        stats.os, "access", lambda path, mode: locked not in (path, Path(path).parent)
    )
    keeper = HistoryKeeper(open_stats(None, model, home, 1000.0), "abc")
    keeper.take([[0, 5, 0], []], 1001.0)
    keeper.save()  # what came with the model and what is new
    read = open_stats(None, model, home, 1001.0).history.counts[0]
    assert read == pytest.approx((4.0, 5.0, 8.0), abs=1e-3)
    save_history(beside, replace(HISTORY, saved_at=1002.0), "abc")
    assert open_stats(None, model, home, 1002.0).history.counts == HISTORY.counts


def test_off_reads_and_writes_nothing(model: StatsModel, home: Path) -> None:
    save_history(default_paths(model, home)[0], HISTORY, "abc")
    assert open_stats("off", model, home, 0.0) == StatsFile(None, RoutingHistory.empty(LAYERS, 0.0))


def test_a_dense_model_has_no_file(model: StatsModel, home: Path) -> None:
    dense = StatsModel(model.path, "abc", (LayerExperts(0, 0),), (0,))
    assert open_stats(None, dense, home, 0.0).path is None


@pytest.mark.parametrize("place", [0, 1], ids=["beside", "at home"])
@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("{", "{path} is not a routing statistics file: "),
        ("", "{path} is not a routing statistics file: "),
        ({"model": "other"}, "{path} is of another model (other, not abc)."),
        ({"counts": [[1.0]]}, "The routing statistics are for 1 layer with 1 experts, the model"),
    ],
    ids=["broken", "empty", "another model", "other layers"],
)
def test_a_bad_file_that_was_only_found_is_moved_aside_and_statistics_start_anew(
    model: StatsModel,
    home: Path,
    place: int,
    wrong: str | dict[str, object],
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = default_paths(model, home)[place]
    save_history(path, HISTORY, "abc")
    content = wrong if isinstance(wrong, str) else json.dumps(json.loads(path.read_text()) | wrong)
    path.write_text(content)
    aside = path.with_name(path.name + ".broken")
    found = open_stats(None, model, home, 0.0)
    assert found.counts is None
    assert caplog.messages[0].startswith(
        f"routing: {path} is not used, and is moved to {aside} when new statistics are saved: "
        f"{why.format(path=path)}"
    )
    assert len(caplog.messages) == 1
    assert path.read_text() == content  # reading moves nothing
    keeper = HistoryKeeper(found, "abc")
    keeper.take([[1] * layer.experts for layer in LAYERS], 0.0)
    keeper.save()
    assert aside.read_text() == content
    caplog.clear()
    again = open_stats(None, model, home, 0.0)
    assert again.counts is not None
    assert not again.broken
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_bad_file_does_not_hide_a_good_one(model: StatsModel, home: Path) -> None:
    beside, at_home = default_paths(model, home)
    beside.write_text("")
    save_history(at_home, HISTORY, "abc")
    found = open_stats(None, model, home, 1000.0)
    assert found.counts == HISTORY.counts
    assert (found.path, found.broken) == (beside, (beside,))


def test_a_named_file_may_be_empty(model: StatsModel, home: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.touch()
    assert open_stats(str(path), model, home, 0.0).counts is None


def test_a_named_file_that_is_bad_is_refused(model: StatsModel, home: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    save_history(path, HISTORY, "other")
    text = f"{path} is of another model (other, not abc). Name the file of this model"
    with pytest.raises(FormatError, match=re.escape(text)):
        open_stats(str(path), model, home, 0.0)
    path.write_text("nothing")
    with pytest.raises(FormatError, match="is not a routing statistics file") as refused:
        open_stats(str(path), model, home, 0.0)
    assert refused.value.hint == "Name another, or a new one."


def test_counts_from_the_future_fade_from_now_on(model: StatsModel, home: Path) -> None:
    save_history(default_paths(model, home)[0], replace(HISTORY, saved_at=1e15), "abc")
    found = open_stats(None, model, home, 1000.0)
    assert found.history == HISTORY  # as if it were saved now
    assert found.history.decayed(1000.0 + HALF_LIFE_S).counts == ((2.0, 0.0, 4.0), ())


def test_a_named_file_may_be_new_but_must_be_possible(
    model: StatsModel, home: Path, tmp_path: Path
) -> None:
    new = tmp_path / "mine.json"
    assert open_stats(str(new), model, home, 0.0).path == new
    lost = tmp_path / "new" / "mine.json"
    text = f"--routing-stats {lost} is in a folder that does not exist. Make the folder, or name"
    with pytest.raises(OptionError, match=re.escape(text)):
        open_stats(str(lost), model, home, 0.0)
    assert not lost.parent.exists()
    (tmp_path / "file").write_text("")
    impossible = tmp_path / "file" / "mine.json"
    text = f"--routing-stats {impossible} cannot be written. Name another file, or off for none."
    with pytest.raises(OptionError, match=re.escape(text)):
        open_stats(str(impossible), model, home, 0.0)


def test_a_named_file_that_cannot_be_written_is_read_and_kept(
    model: StatsModel,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "mine.json"
    save_history(path, HISTORY, "abc")
    monkeypatch.setattr(stats.os, "access", lambda path, mode: False)
    assert open_stats(str(path), model, home, 1000.0) == StatsFile(None, HISTORY)
    assert "cannot be written; new choices are not saved" in caplog.text


def test_every_choice_is_added_once_and_the_old_ones_fade(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    keeper = HistoryKeeper(StatsFile(path, HISTORY), "abc")
    keeper.take([[2, 0, 0], [0, 0, 0]], 1000.0)
    keeper.take([[2, 0, 0], [0, 0, 0]], 1000.0 + HALF_LIFE_S)  # nothing new: nothing changes
    found = keeper.take([[2, 3, 0], [0, 0, 0]], 1000.0 + HALF_LIFE_S)
    assert found.counts == ((3.0, 3.0, 4.0), ())
    keeper.save()
    assert load_history(path, "abc", LAYERS) == found


def test_nothing_new_is_not_saved(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    keeper = HistoryKeeper(StatsFile(path, HISTORY), "abc")
    keeper.take([[0, 0, 0], [0, 0, 0]], 5.0)
    keeper.save()
    assert not path.exists()


def test_a_save_that_fails_is_reported_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "folder").write_text("")
    keeper = HistoryKeeper(StatsFile(tmp_path / "folder" / "m.json", HISTORY), "abc")
    keeper.take([[1, 0, 0], [0, 0, 0]], 1000.0)
    with caplog.at_level(logging.WARNING):
        keeper.save()
    assert "routing: cannot save" in caplog.text
    (tmp_path / "folder").unlink()
    keeper.save()
    assert load_history(tmp_path / "folder" / "m.json", "abc", LAYERS).counts[0][0] == 5.0


def test_choices_that_are_saved_are_not_saved_again(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    keeper = HistoryKeeper(StatsFile(path, HISTORY), "abc")
    keeper.take([[1, 0, 0], [0, 0, 0]], 1000.0)
    keeper.save()
    path.unlink()
    keeper.save()
    assert not path.exists()
