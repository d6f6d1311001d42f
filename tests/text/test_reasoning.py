"""The marks around thoughts, by vocabulary and template."""

from typing import Any

import pytest

from headroom.formats.vocabulary import Vocabulary
from headroom.text.chat_template import ChatTemplate
from headroom.text.reasoning import Reasoning, find_reasoning
from headroom.text.spelling import BYTE_OF
from headroom.text.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "Why? <think>"}]
# Only what the published templates do with the last turn.
QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
QWEN35 = QWEN3.replace("{% endif %}", "{% else %}<think>\n{% endif %}")
LAGUNA = (
    "〈|EOS|〉{% for m in messages %}<{{ m.role }}>\n{{ m.content }}</{{ m.role }}>\n{% endfor %}"
    "<assistant>\n{% if enable_thinking | default(false) %}<think>{% else %}</think>{% endif %}"
)
GEMMA4 = (
    "<bos>{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content }}<turn|>\n{% endfor %}"
    "<|turn>model\n{% if not enable_thinking %}<|channel>thought\n<channel|>{% endif %}"
)
MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}"
    "{% if m.thinking is defined %}[THINK]{{ m.thinking }}[/THINK]{% endif %}{{ m.content }}</s>"
    "{% endif %}{% endfor %}"
)
THINK = ("<think>", "</think>")
CHANNEL = ("<|channel>", "<channel|>")
BRACKETS = ("[THINK]", "[/THINK]")


def tokenizer(*special: str) -> Tokenizer:
    tokens = [*BYTE_OF, *special]
    return Tokenizer.from_vocabulary(
        Vocabulary(
            model="gpt2",
            pre="qwen2",
            tokens=tokens,
            types=[*[1] * len(BYTE_OF), *[3] * len(special)],
            scores=[],
            merges=[],
            special_ids={},
            add_bos=False,
        )
    )


def found_in(source: str, *special: str) -> tuple[Reasoning | None, ChatTemplate]:
    template = ChatTemplate(source, "", "")
    return find_reasoning(tokenizer(*special), template), template


@pytest.mark.parametrize(
    ("source", "special", "marks", "opened"),
    [
        (QWEN3, THINK, ("<think>", "</think>"), False),
        (QWEN35, THINK, ("<think>", "</think>"), True),
        (LAGUNA, THINK, ("<think>", "</think>"), False),
        (GEMMA4, CHANNEL, ("<|channel>thought\n", "<channel|>"), False),
        (MISTRAL, BRACKETS, ("[THINK]", "[/THINK]"), False),
    ],
    ids=["qwen3", "qwen3.5", "laguna", "gemma4", "mistral"],
)
def test_each_family_s_marks_are_known(
    source: str, special: tuple[str, str], marks: tuple[str, str], opened: bool
) -> None:
    found, _ = found_in(source, *special)
    assert found is not None
    assert (found.start, found.end, found.opened) == (*marks, opened)
    assert (found.start_id, found.end_id) == (256, 257)


@pytest.mark.parametrize(
    ("source", "special", "variables", "opened"),
    [
        (QWEN3, THINK, {}, False),
        (QWEN3, THINK, {"enable_thinking": False}, False),
        (QWEN35, THINK, {}, True),
        (QWEN35, THINK, {"enable_thinking": False}, False),
        (LAGUNA, THINK, {"enable_thinking": True}, True),
        (LAGUNA, THINK, {}, False),
        (GEMMA4, CHANNEL, {"enable_thinking": True}, False),
        (GEMMA4, CHANNEL, {}, False),
    ],
)
def test_a_prompt_says_whether_the_answer_begins_inside_a_thought(
    source: str, special: tuple[str, str], variables: dict[str, Any], opened: bool
) -> None:
    found, template = found_in(source, *special)
    assert found is not None
    assert found.is_open(template.render(CHAT, **variables)) is opened


def test_a_model_whose_template_has_no_end_mark_does_not_think() -> None:
    assert found_in("{{ messages[0].content }}", *THINK, *CHANNEL)[0] is None


def test_marks_must_be_single_tokens() -> None:
    assert found_in(QWEN3)[0] is None
    assert found_in(QWEN3, "<think>")[0] is None


def test_without_a_template_the_vocabulary_decides() -> None:
    found = find_reasoning(tokenizer(*CHANNEL), None)
    assert found is not None
    assert (found.start, found.opened) == ("<|channel>thought\n", False)


def test_a_template_that_refuses_the_probe_opens_nothing() -> None:
    found, _ = found_in("{{ raise_exception('two at least') }}</think><think>", *THINK)
    assert found is not None
    assert not found.opened


def test_the_probe_is_a_message_of_a_user() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'user' and m.content %}<think>{% endif %}"
        "{% endfor %}{# </think> #}"
    )
    found = find_reasoning(tokenizer(*THINK), ChatTemplate(source, "", ""))
    assert found is not None
    assert found.opened
