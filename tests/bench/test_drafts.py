"""Guessing ahead with imposed shares of right guesses."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from headroom.bench.drafts import Imposed, ImposedDrafter
from headroom.bench.figures import BenchSettings
from headroom.bench.report import report_json
from headroom.bench.run import count_steps
from headroom.errors import OptionError
from headroom.families.synth.recipe import cut, with_mtp
from headroom.families.synth.values import Source
from headroom.families.synth.write import write_gguf
from headroom.kernels.native import measure
from tests.bench.test_prefix import measured, shown
from tests.imposed_drafts import write_draft
from tests.synth_models import MODELS, write_model

SMALL = BenchSettings(contexts=(20,), tokens=40, accept=(0.0, 0.8, 1.0), only=("draft",))


@pytest.fixture(autouse=True)
def _small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "TOUCHED_BYTES", 8 << 20)


@pytest.mark.parametrize("family", ["llama", "qwen35moe"])
def test_answers_are_measured_with_each_share_of_right_guesses(tmp_path: Path, family: str) -> None:
    path = write_model(family, "q8_0", tmp_path, few_layers=True)
    report = measured(path, SMALL, draft_tokens=4)
    none, most, all_right = report.figures.drafts
    assert [figure.equal for figure in (none, most, all_right)] == [True] * 3
    assert (none.right, none.tokens, none.steps, none.accepted_length) == (0, 39, 39, 1.0)
    assert all_right.right == all_right.guessed
    assert all_right.accepted_length == 39 / 8  # of 5 tokens each, but for the last
    assert 1 < most.accepted_length < all_right.accepted_length
    found = json.loads(json.dumps(report_json(report)))["draft"]
    assert [figure["share"] for figure in found] == [0.0, 0.8, 1.0]
    assert found[1]["speed_up"] == pytest.approx(most.plain_s / most.seconds)
    assert "guessing 4 tokens ahead after 20 tokens" in shown(report)
    assert "3 of 3 answers equal those without guesses" in shown(report)


def test_the_option_draft_asks_for_the_figures_and_others_stay_without_guesses(
    tmp_path: Path,
) -> None:
    path = write_model("llama", "q8_0", tmp_path, few_layers=True)
    decoding = replace(SMALL, only=("decode",), batches=(1,), tokens=8)
    assert measured(path, decoding).figures.drafts == []
    both = measured(path, decoding, draft="ngram").figures
    assert len(both.drafts) == 3
    assert len(both.decodes) == 1
    assert count_steps(replace(decoding, only=("decode", "draft")), peer=False) == 2 + 1 + 4


def test_a_draft_model_guesses_and_the_share_is_imposed_on_its_guesses(tmp_path: Path) -> None:
    path = write_model("llama", "q8_0", tmp_path, few_layers=True)
    draft = write_draft(tmp_path / "draft.gguf", (0, 1))
    for guesses, length in ((3, 39 / 10), (8, 39 / 10)):  # a block has places for three guesses
        report = measured(path, SMALL, draft=str(draft), draft_tokens=guesses)
        none, most, all_right = report.figures.drafts
        assert [figure.equal for figure in (none, most, all_right)] == [True] * 3
        assert all_right.accepted_length == length
        assert none.right == 0
        assert 1 < most.accepted_length < length
        lines = {line.name for line in report.plan.devices[0].lines}
        assert {"draft_weights", "draft_kv", "features"} <= lines


def test_a_prediction_head_neither_guesses_in_other_figures_nor_is_measured(tmp_path: Path) -> None:
    recipe = with_mtp(replace(MODELS["qwen35"], dims=cut(MODELS["qwen35"].dims, 4)))
    write_gguf(Source(recipe, seed=3), tmp_path / "m.gguf", "q8_0")
    decoding = replace(SMALL, only=("decode",), batches=(1,), tokens=8)
    report = measured(tmp_path / "m.gguf", decoding)
    assert report.plan.problem.options.draft == "none"
    with pytest.raises(OptionError, match="so measures no prediction head"):
        measured(tmp_path / "m.gguf", decoding, draft="mtp")


@pytest.mark.parametrize("accept", [(), (1.5,), (0.5, -0.1)])
def test_shares_are_numbers_from_0_to_1(accept: tuple[float, ...]) -> None:
    with pytest.raises(OptionError, match="--accept is"):
        BenchSettings(accept=accept)


def test_the_imposed_share_of_guesses_is_right() -> None:
    imposed, text = Imposed(), list(range(2000))
    imposed.impose(text, 0.7, 5000)
    drafter = ImposedDrafter(imposed)
    right = sum(
        token == at
        for start in range(1, 1900, 8)
        for at, token in enumerate(drafter.guess(text[:start], 8).tokens, start=start)
    )
    assert right / 1904 == pytest.approx(0.7, abs=0.04)
    assert not drafter.guess(text, 8)
