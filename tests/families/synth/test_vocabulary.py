"""Tokenizers and chat templates of synthesised checkpoints."""

from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Coder

from headroom.errors import OptionError
from headroom.families.family import Recipe
from headroom.families.files import open_checkpoint
from headroom.families.registry import KNOWN, RUNNABLE
from headroom.families.synth.recipe import find_recipe
from headroom.families.synth.values import Source
from headroom.families.synth.vocabulary import byte_alphabet, make_vocabulary, tokenizer_kind
from headroom.families.synth.write import write_gguf
from headroom.text.chat_template import ChatTemplate
from headroom.text.tokenizer import Tokenizer
from headroom.text.tokenizer_file import tokenizer_file

TEXTS = (
    "What would the people say?\n\n  Twelve: 12, 3.5!",
    "na\u00efve \u4e16\u754c \U0001f600",
    "\t a\r\n",
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes"},
    {"role": "user", "content": "Why?"},
]
TURNS = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\nYes<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n"
    "<|im_start|>assistant\n"
)
GEMMA_TURNS = (
    "<bos><|turn>system\n{}Be brief.<turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\nYes<turn|>\n"
    "<|turn>user\nWhy?<turn|>\n<|turn>model\n"
)
GEMMA3_TURNS = (
    "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n"
    "<start_of_turn>model\nYes<end_of_turn>\n"
    "<start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\n"
)
GLM_TURNS = (
    "[gMASK]<sop><|system|>\nBe brief.<|user|>\nHi<|assistant|>\nYes<|user|>\nWhy?<|assistant|>\n"
)
HARMONY_TURNS = (
    "<|start|>system<|message|>Be brief.<|end|><|start|>user<|message|>Hi<|end|>"
    "<|start|>assistant<|message|>Yes<|end|><|start|>user<|message|>Why?<|end|><|start|>assistant"
)
MISTRAL_TURNS = (
    "<bos>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Hi[/INST]Yes<eos>[INST]Why?[/INST]"
)
LAGUNA_TURNS = (
    "\u3008|EOS|\u3009<system>\nBe brief.\n</system>\n<user>\nHi\n</user>\n"
    "<assistant>\nYes\n</assistant>\n<user>\nWhy?\n</user>\n<assistant>\n"
)


def known(model: str) -> Recipe:
    """The recipe of a published model."""
    return find_recipe(KNOWN[model].architecture, model)


def template_of(family: str) -> str:
    """The chat template of a family's small model."""
    return tokenizer_kind(find_recipe(family, "tiny")).template


@pytest.mark.parametrize("family", RUNNABLE)
def test_text_survives_the_tokenizer_of_a_file(family: str, tmp_path: Path) -> None:
    write_gguf(Source(find_recipe(family, "tiny"), 0), tmp_path / "m.gguf", "q8_0")
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    assert checkpoint.vocabulary is not None
    copy = Coder.from_str(tokenizer_file(checkpoint.vocabulary))
    for text in TEXTS:
        ids = tokenizer.encode(text, add_bos=False)
        assert tokenizer.decode(ids) == text
        assert copy.encode(text, add_special_tokens=False).ids == ids
        assert copy.decode(ids, skip_special_tokens=False) == text
    assert len(tokenizer.encode(" would the people", add_bos=False)) == 3
    assert checkpoint.chat_template is not None
    template = ChatTemplate(checkpoint.chat_template, tokenizer.bos_token, tokenizer.eos_token)
    prompt = template.render(CHAT, enable_thinking=False)
    assert tokenizer.decode(tokenizer.encode(prompt, add_bos=False)) == prompt
    control = [i for i in tokenizer.encode(prompt) if tokenizer.is_control(i)]
    assert len(control) >= len(CHAT)  # marks of turns are single tokens


@pytest.mark.parametrize(
    ("family", "off", "on"),
    [
        ("llama", TURNS, TURNS),
        ("qwen3", TURNS + "<think>\n\n</think>\n\n", TURNS),
        ("qwen35", TURNS + "<think>\n\n</think>\n\n", TURNS + "<think>\n"),
        ("mistral3", MISTRAL_TURNS, MISTRAL_TURNS),
        ("smollm3", TURNS + "<think>\n\n</think>\n", TURNS),
        ("laguna", LAGUNA_TURNS + "</think>", LAGUNA_TURNS + "<think>"),
        ("glm4moe", GLM_TURNS + "<think></think>\n", GLM_TURNS),
        ("gpt-oss", HARMONY_TURNS, HARMONY_TURNS),
        ("gemma3", GEMMA3_TURNS, GEMMA3_TURNS),
        (
            "gemma4",
            GEMMA_TURNS.format("") + "<|channel>thought\n<channel|>",
            GEMMA_TURNS.format("<|think|>"),
        ),
    ],
)
def test_prompts_have_the_shape_of_the_family(family: str, off: str, on: str) -> None:
    template = ChatTemplate(template_of(family), "<bos>", "<eos>")
    assert template.render(CHAT, enable_thinking=False) == off
    assert template.render(CHAT, enable_thinking=True) == on


def test_tools_reach_the_prompt_of_qwen() -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    prompt = ChatTemplate(template_of("qwen35"), "", "").render(CHAT, tools=[tool])
    assert '"name": "add"' in prompt


def test_special_tokens_stand_at_the_ids_of_the_real_models() -> None:
    def token(model: str, token_id: int) -> str:
        return make_vocabulary(known(model)).tokens[token_id]

    assert token("smollm2-135m", 2) == "<|im_end|>"
    assert token("qwen3-0.6b", 151645) == "<|im_end|>"
    assert token("qwen3.6-27b", 248046) == "<|im_end|>"
    assert token("qwen3.6-27b", 248044) == "<|endoftext|>"
    assert token("laguna-xs.2", 24) == "</assistant>"
    assert token("mixtral-8x7b", 2) == "</s>"
    assert token("glm-4.5-air", 151336) == "<|user|>"
    assert token("gpt-oss-20b", 200002) == "<|return|>"
    assert token("smollm3-3b", 128012) == "<|im_end|>"
    assert token("gemma-3-4b", 106) == "<end_of_turn>"
    assert token("gemma-4-31b", 106) == "<turn|>"
    assert token("qwen3.6-27b", 248319) == "[PAD248319]"


def test_a_draft_has_the_vocabulary_of_its_target() -> None:
    draft = make_vocabulary(known("qwen3.6-27b-dflash"))
    assert draft.special_ids["mask"] == 248070
    assert make_vocabulary(known("gemma-4-31b-dflash")).model == "gemma4"


def test_every_byte_has_a_character_of_its_own() -> None:
    alphabet = byte_alphabet()
    assert len(set(alphabet)) == 256
    assert (alphabet[ord("a")], alphabet[ord(" ")], alphabet[ord("\n")]) == (
        "a",
        "\u0120",
        "\u010a",
    )


def test_a_vocabulary_too_small_for_its_tokens_is_refused() -> None:
    recipe = find_recipe("qwen3", "tiny")
    with pytest.raises(OptionError, match="A vocabulary of 300 tokens is too small for qwen3"):
        make_vocabulary(replace(recipe, dims=replace(recipe.dims, vocab=300)))
