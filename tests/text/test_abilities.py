"""Abilities: what a model's files say about chat, thoughts and tools."""

from dataclasses import replace
from pathlib import Path

from headroom.families.files import open_checkpoint
from headroom.text.abilities import Abilities
from tests.synth_models import write_model


def test_the_abilities_of_a_thinking_model_name_its_marks(tmp_path: Path) -> None:
    path = write_model("qwen35", "q8_0", tmp_path, few_layers=True)
    abilities = Abilities.of(open_checkpoint(path))
    facts = abilities.reasoning_facts()
    assert (facts["supported"], facts["start"].strip(), facts["end"]) == (
        True,
        "<think>",
        "</think>",
    )
    assert "<|im_end|>" in abilities.stop_tokens()


def test_a_plain_model_has_neither_thoughts_nor_a_format_of_its_own(tiny_path: Path) -> None:
    abilities = Abilities.of(open_checkpoint(tiny_path))
    assert abilities.template is not None
    assert abilities.reasoning_facts() == {"supported": False}
    assert abilities.stop_tokens() == ["<|end|>"]


def test_facts_of_thoughts_say_who_begins_them_and_the_known_efforts(tmp_path: Path) -> None:
    path = write_model("qwen35", "q8_0", tmp_path, few_layers=True)
    abilities = Abilities.of(open_checkpoint(path))
    assert abilities.reasoning is not None
    for opened, default in ((True, "on"), (False, "by the model")):
        facts = replace(abilities, reasoning=replace(abilities.reasoning, opened=opened))
        assert facts.reasoning_facts()["default"] == default
        assert facts.reasoning_facts()["efforts"][:3] == ["none", "minimal", "low"]
