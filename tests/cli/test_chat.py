"""`headroom chat`: the conversation, its commands, and Ctrl-C."""

import io
import logging
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from headroom.cli.chat import HELP, Chat, ChatSession, rate, read_message
from headroom.cli.main import run_command
from headroom.engine.request import SamplingParams
from headroom.errors import OptionError, RequestError
from headroom.options import Options


def typed(*lines: str | type[BaseException]) -> Callable[[bool], str]:
    """Return a reader of these lines, then of the end; an exception is raised in its turn."""
    rest = iter(lines)

    def read(more: bool) -> str:
        line = next(rest, EOFError)
        if isinstance(line, str):
            return line
        raise line

    return read


def talk(llm: Any, *lines: str | type[BaseException], terminal: bool = False) -> tuple[str, Any]:
    """Hold a conversation and return what was shown, and the conversation."""
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=terminal, color_system=None, width=100)
    conversation = ChatSession(SamplingParams(seed=1), {"temperature": 0.6})
    Chat(llm, conversation, console).talk(typed(*lines))
    return shown.getvalue(), conversation


def test_the_model_is_told_what_was_said_before(fake_llm: Any) -> None:
    shown, _ = talk(fake_llm, "one", "", "two")
    assert shown == "Hello there.\nHello there.\n"
    assert fake_llm.asked[1] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "Hello there."},
        {"role": "user", "content": "two"},
    ]


def test_every_answer_draws_anew_but_repeats_with_the_same_seed(fake_llm: Any) -> None:
    talk(fake_llm, "one", "two")
    talk(fake_llm, "one", "two")
    assert [params.seed for params in fake_llm.params] == [1, 2, 1, 2]


def test_a_trailing_backslash_goes_on_in_the_next_line() -> None:
    assert read_message(typed("one\\", "two\\", "three", "four")) == "one\ntwo\nthree"


def test_quit_and_the_end_of_input_leave(fake_llm: Any) -> None:
    talk(fake_llm, "/quit", "one")
    assert fake_llm.asked == []


def test_ctrl_c_stops_the_answer_and_not_the_program(fake_llm: Any) -> None:
    fake_llm.interrupt = True
    shown, conversation = talk(fake_llm, "one", "two", terminal=True)
    assert shown.startswith("Hello\n1 token, stopped\n\nHello\n")
    assert [turn["content"] for turn in conversation.turns] == ["one", "Hello", "two", "Hello"]


def test_ctrl_c_before_the_answer_begins_takes_the_question_back(
    fake_llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = fake_llm.stream_chat

    def interrupted_once(messages: Any, params: SamplingParams) -> Any:
        monkeypatch.setattr(fake_llm, "stream_chat", stream)
        raise KeyboardInterrupt

    monkeypatch.setattr(fake_llm, "stream_chat", interrupted_once)
    shown, conversation = talk(fake_llm, "one", "two")
    assert shown == "stopped\nHello there.\n"
    assert [turn["content"] for turn in conversation.turns] == ["two", "Hello there."]


def test_ctrl_c_at_the_prompt_says_how_to_leave(fake_llm: Any) -> None:
    shown, _ = talk(fake_llm, KeyboardInterrupt, "one")
    assert "Ctrl-D or /quit leaves." in shown
    assert len(fake_llm.asked) == 1


def test_a_terminal_shows_the_token_rate_and_a_pipe_does_not(fake_llm: Any) -> None:
    assert "3 tokens, " in talk(fake_llm, "one", terminal=True)[0]
    assert "tokens" not in talk(fake_llm, "one", terminal=False)[0]


def test_the_rate_counts_from_the_first_token() -> None:
    assert rate([10.0, 10.5, 11.0]) == ", 2.0 tokens/s"
    assert rate([10.0]) == ""


def test_a_refused_question_is_reported_and_forgotten(fake_llm: Any) -> None:
    shown, conversation = talk(fake_llm, "refuse", "one")
    assert shown.startswith("error: The prompt has 99 tokens. The context holds 64.\n")
    assert [turn["content"] for turn in conversation.turns] == ["one", "Hello there."]


def test_reset_forgets_the_turns_and_keeps_the_system_text(fake_llm: Any) -> None:
    talk(fake_llm, "/system Be brief", "one", "/reset", "two")
    assert fake_llm.asked[1] == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "two"},
    ]


def test_a_thought_goes_back_to_the_model_as_reasoning(fake_llm: Any) -> None:
    fake_llm.thought = "Let me see."
    talk(fake_llm, "one", "two")
    assert fake_llm.asked[1][1] == {
        "role": "assistant",
        "content": "Hello there.",
        "reasoning_content": "Let me see.",
    }


def test_set_without_a_value_goes_back_to_the_models_own(fake_llm: Any) -> None:
    shown, _ = talk(fake_llm, "/set temperature 0.3", "/set temperature", "one")
    assert "temperature is 0.6.\n" in shown
    assert fake_llm.params[0].temperature == 0.6


def test_set_changes_how_the_next_answer_is_drawn(fake_llm: Any) -> None:
    shown, _ = talk(fake_llm, "/set temperature 0.3", "/set top-k=5", "one")
    assert shown.startswith("temperature is 0.3.\ntop_k is 5.\n")
    assert (fake_llm.params[0].temperature, fake_llm.params[0].top_k) == (0.3, 5)


def test_set_without_a_value_goes_back_to_the_default(fake_llm: Any) -> None:
    lines = ("/set stop END", "/set ignore_eos on", "/set max_tokens 3", "one")
    talk(fake_llm, *lines, "/set stop", "/set ignore_eos off", "/set max_tokens", "two")
    first, second = fake_llm.params
    assert (first.stop, first.ignore_eos, first.max_tokens) == (("END",), True, 3)
    assert (second.stop, second.ignore_eos, second.max_tokens) == ((), False, None)


def test_set_alone_shows_every_setting(fake_llm: Any) -> None:
    assert "temperature 1.0\n" in talk(fake_llm, "/set")[0]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("/nonsense", OptionError),
        ("/set temperature warm", OptionError),
        ("/set temperature -1", RequestError),
        ("/set colour red", OptionError),
        ("/set ignore_eos perhaps", OptionError),
    ],
)
def test_a_wrong_command_changes_nothing(line: str, error: type[Exception]) -> None:
    conversation = ChatSession(SamplingParams(seed=1), {"temperature": 0.6})
    with pytest.raises(error):
        conversation.command(line)
    assert conversation == ChatSession(SamplingParams(seed=1), {"temperature": 0.6})


def test_help_lists_every_command(fake_llm: Any) -> None:
    assert talk(fake_llm, "/help")[0] == f"{HELP}\n"


def test_lines_may_come_from_a_pipe(
    opened: list[Options],
    fake_llm: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    assert run_command(["chat", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "Hello there.\nHello there.\n"
    assert fake_llm.params[0].temperature == 0


def test_an_answer_cut_by_the_context_is_a_warning(
    fake_llm: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("headroom"), "propagate", True)
    talk(fake_llm, "one")
    assert caplog.messages == []
    fake_llm.finish_reason = "length"
    talk(fake_llm, "one")
    assert [text.partition(",")[0] for text in caplog.messages] == ["answer: cut after 3 tokens"]
