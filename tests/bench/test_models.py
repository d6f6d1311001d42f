"""`synth:SIZE:QUANT` names a model that can be written."""

from pathlib import Path

import pytest

from headroom.bench.models import parse_synth
from headroom.errors import OptionError


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("synth:qwen3.5-35b-a3b:q4_k_m", "qwen35moe-qwen3.5-35b-a3b-q4_k_m.gguf"),
        ("synth:Qwen3.5-27B", "qwen35-qwen3.5-27b-q4_k_m.gguf"),
        ("synth:llama:Q8_0", "llama-tiny-q8_0.gguf"),
        ("synth:gemma4/tiny-moe", "gemma4-tiny-moe-q4_k_m.gguf"),
    ],
)
def test_a_name_says_family_size_and_types(text: str, name: str) -> None:
    found = parse_synth(text)
    assert found is not None
    assert found.path(Path("home")) == Path("home/synth") / name


def test_other_names_are_no_synthesised_models() -> None:
    assert parse_synth("qwen3.5-27b") is None
    assert parse_synth("") is None


def test_what_cannot_be_made_is_refused() -> None:
    with pytest.raises(OptionError, match=r"'gpt' is no model .* run\. .*qwen3\.5-27b"):
        parse_synth("synth:gpt")
    for draft in ("dflash", "qwen3.5-27b-dflash"):
        with pytest.raises(OptionError, match=f"'{draft}' is no model to synthesise and run"):
            parse_synth(f"synth:{draft}")
    with pytest.raises(OptionError, match="'q3' is no quantisation"):
        parse_synth("synth:llama:q3")
    with pytest.raises(OptionError, match="'huge' is no size of llama"):
        parse_synth("synth:llama/huge")
