"""Settings of exchanges become rules, or are refused by name."""

from pathlib import Path

import pytest

from headroom.errors import OptionError
from headroom.experts.exchange import ExchangePolicy
from headroom.options import Options
from headroom.split.upkeep_rules import UpkeepRules, upkeep_rules


def test_settings_become_rules() -> None:
    options = Options(
        swap_every="64",
        swap_bytes="1MiB",
        swap_min_gain=3,
        swap_false_chance=0.25,
        swap_per_layer=5,
        save_placement="placed.json",
    )
    assert upkeep_rules(options) == UpkeepRules(
        swap_every=64,
        policy=ExchangePolicy(min_gain=3, false_chance=0.25, per_layer=5, most_bytes=1 << 20),
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
def test_a_value_that_is_no_number_of_tokens_is_refused(text: str) -> None:
    with pytest.raises(OptionError) as refused:
        upkeep_rules(Options(swap_every=text))
    assert str(refused.value) == (
        f"--swap-every is {text!r}. Write a number of tokens, 0 for exchanges only between "
        "requests, or off."
    )


def test_bytes_of_exchanges_that_are_no_size_are_refused_by_name() -> None:
    with pytest.raises(OptionError, match=r"--swap-bytes is 'much', which is not") as refused:
        upkeep_rules(Options(swap_bytes="much"))
    assert refused.value.param == "swap_bytes"
