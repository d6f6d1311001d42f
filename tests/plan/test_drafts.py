"""Drafts for a target: what is read before anything is loaded, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headroom.errors import HeadroomError, ModelError, OptionError
from headroom.families.files import open_checkpoint
from headroom.plan.drafts import describe_draft, draft_shape
from headroom.plan.known import known_shape
from headroom.plan.sources import find_shape
from tests.dflash_drafts import random_draft, target_shape


def test_a_draft_must_be_one_and_must_fit_its_target(tmp_path: Path) -> None:
    target = known_shape("qwen3.6-27b")
    assert draft_shape("qwen3.6-27b-dflash", target, tmp_path).taps == 5
    with pytest.raises(OptionError, match="is not a draft"):
        draft_shape("qwen3-0.6b", target, tmp_path)
    with pytest.raises(OptionError, match="made for a model with 2048 values a token"):
        draft_shape("qwen3.6-35b-a3b-dflash", target, tmp_path)


def test_a_plan_reads_a_draft_of_this_disk_as_a_run_does(tmp_path: Path) -> None:
    folder = random_draft().save(tmp_path / "draft")
    found = describe_draft(open_checkpoint(folder), target_shape())
    assert draft_shape(str(folder), target_shape(), tmp_path) == found.shape
    assert find_shape(str(folder), tmp_path) == replace(found.shape, tap_layers=())
    assert (found.shape.taps, found.shape.tap_width, found.shape.block) == (3, 64, 8)
    assert found.shape.tap_layers == found.config.taps == (0, 2, 3)


@pytest.mark.parametrize(
    ("target", "changes", "message"),
    [
        ({"hidden": 128}, {}, "made for a model with 64 values a token; smollm2 has 128"),
        ({"layers": 5}, {}, "made for a model of 4 layers; smollm2 has 5"),
        ({"vocab": 321}, {}, "made for 320 tokens; smollm2 has 321"),
        ({"layers": 3}, {"num_target_layers": None}, "reads the layers 0, 2, 3; smollm2 has 3"),
        (
            {},
            {"dflash_config": {"mask_token_id": 320, "target_layer_ids": [0, 1, 2]}},
            "The mask of .* is token 320; smollm2 has 320 tokens",
        ),
        (
            {},
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 0, 2]}},
            "reads the layers 0, 0, 2",
        ),
    ],
)
def test_drafts_of_another_target_are_refused(
    target: dict[str, int], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = random_draft(**changes).save(tmp_path)
    with pytest.raises(OptionError, match=message) as caught:
        describe_draft(open_checkpoint(folder), target_shape(**target))
    assert caught.value.param == "draft"


def test_a_projection_must_read_the_layers_that_are_named(tmp_path: Path) -> None:
    draft = random_draft()
    draft.config["dflash_config"] = {"mask_token_id": 7, "target_layer_ids": [0, 1]}
    with pytest.raises(ModelError, match=r"names 2 layers .* its projection reads 3"):
        describe_draft(open_checkpoint(draft.save(tmp_path)), target_shape())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("DFlash2DraftModel", "DFlash2"),
        ("DSparkDraftModel", "DSpark"),
        ("LagunaDFlashDraftModel", "Laguna DFlash"),
    ],
)
def test_drafts_of_other_kinds_are_refused_by_name(name: str, kind: str, tmp_path: Path) -> None:
    folder = random_draft(architectures=[name]).save(tmp_path)
    for refused in (
        lambda: describe_draft(open_checkpoint(folder), target_shape()),
        lambda: draft_shape(str(folder), target_shape(), tmp_path),
    ):
        with pytest.raises(HeadroomError, match=f"is a {kind} draft") as caught:
            refused()
        assert caught.value.param == "draft"


def test_a_model_that_is_no_draft_is_refused(tmp_path: Path) -> None:
    folder = random_draft(architectures=["Qwen3ForCausalLM"]).save(tmp_path)
    with pytest.raises(OptionError, match="is not a draft: it reads no features"):
        describe_draft(open_checkpoint(folder), target_shape())
