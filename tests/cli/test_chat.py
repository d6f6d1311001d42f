"""`headroom chat`: the conversation, its commands, Ctrl-C, and the end of the context."""

import io
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headroom.cli.chat import CHAT_COMMANDS, OTHER_NAMES, Chat, find_command
from headroom.cli.chat_session import CHAT_SETTINGS, ChatSession, ChatTurn
from headroom.cli.main import run_command
from headroom.engine.request import SamplingParams
from headroom.errors import OptionError
from headroom.options import Options

LEAVES = "Ctrl-C again, Ctrl-D or /exit leaves.\n"


class Typed:
    """Messages that are typed in turn, then the end; an exception is raised in its turn."""

    def __init__(self, *messages: str | type[BaseException]) -> None:
        self._rest = iter(messages)

    def read(self) -> str:
        message = next(self._rest, EOFError)
        if isinstance(message, str):
            return message
        raise message


class Talk:
    """A conversation with a model that is not there, and what was seen of it."""

    def __init__(self, llm: Any, *, terminal: bool = False) -> None:
        self.shown, self.noted = io.StringIO(), io.StringIO()
        console, notes = (
            Console(file=file, force_terminal=terminal, color_system=None, width=100)
            for file in (self.shown, self.noted)
        )
        self.session = ChatSession(SamplingParams(seed=1), {"temperature": 0.6})
        self.chat = Chat(llm, self.session, console, notes)

    def say(self, *messages: str | type[BaseException]) -> str:
        """Type messages; return what was seen of them, but not the notes."""
        before = len(self.shown.getvalue())
        self.all_answered = self.chat.converse(Typed(*messages))
        return self.shown.getvalue()[before:]

    @property
    def said(self) -> list[str]:
        return [text for turn in self.session.turns for text in (turn.question, turn.answer)]


def test_the_model_is_told_what_was_said_before(fake_llm: Any) -> None:
    assert Talk(fake_llm).say("one", "", "two") == "Hello there.\nHello there.\n"
    assert fake_llm.asked[1] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "Hello there."},
        {"role": "user", "content": "two"},
    ]


def test_every_answer_draws_anew_but_repeats_with_the_same_seed(fake_llm: Any) -> None:
    for _ in range(2):
        Talk(fake_llm).say("one", "two")
    assert [params.seed for params in fake_llm.params] == [1, 2, 1, 2]


@pytest.mark.parametrize("word", ["/exit", "/quit", "/bye"])
def test_a_word_and_the_end_of_input_leave(word: str, fake_llm: Any) -> None:
    Talk(fake_llm).say(word, "one")
    assert fake_llm.asked == []


@pytest.fixture
def interrupted(fake_llm: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The fake model; Ctrl-C is pressed after the first token of each of its answers."""
    stream_chat = fake_llm.stream_chat

    def stopped(*given: Any) -> Any:
        with closing(stream_chat(*given)) as deltas:
            yield next(deltas)
            raise KeyboardInterrupt

    monkeypatch.setattr(fake_llm, "stream_chat", stopped)
    return fake_llm


def test_ctrl_c_stops_the_answer_and_what_came_of_it_stays(interrupted: Any) -> None:
    talk = Talk(interrupted, terminal=True)
    assert "Hello\n1 token, stopped\n\nHello\n" in talk.say("one", "two")
    assert talk.session.turns == [
        ChatTurn("one", "Hello", stopped=True),
        ChatTurn("two", "Hello", stopped=True),
    ]
    assert interrupted.asked[1][1] == {"role": "assistant", "content": "Hello"}
    assert all(map(interrupted.engine.was_cancelled, [x.id for x in interrupted.engine.requests]))


def test_ctrl_c_after_an_answer_that_it_stopped_leaves(interrupted: Any) -> None:
    talk = Talk(interrupted)
    talk.say("one", KeyboardInterrupt, "two")
    assert talk.said == ["one", "Hello"]


def test_ctrl_c_twice_at_the_prompt_leaves_but_not_with_a_message_between(fake_llm: Any) -> None:
    talk = Talk(fake_llm)
    assert talk.say(KeyboardInterrupt, "one", KeyboardInterrupt, "two").count(LEAVES) == 2
    assert talk.say(KeyboardInterrupt, KeyboardInterrupt, "three") == LEAVES
    assert len(fake_llm.asked) == 2


def test_ctrl_c_before_the_answer_begins_takes_the_question_back(
    fake_llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    deltas = fake_llm.stream_chat

    def interrupted_once(*_: object) -> Any:
        monkeypatch.setattr(fake_llm, "stream_chat", deltas)
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(fake_llm, "stream_chat", interrupted_once)
    talk = Talk(fake_llm)
    assert talk.say("one", "two") == "Hello there.\n"
    assert talk.noted.getvalue() == "stopped before the answer began\n"
    assert talk.said == ["two", "Hello there."]


def test_a_terminal_shows_the_token_rate_and_a_pipe_does_not(fake_llm: Any) -> None:
    assert "4 tokens, 8.0 tokens/s\n" in Talk(fake_llm, terminal=True).say("one")
    assert "tokens" not in Talk(fake_llm).say("one")


def test_an_answer_that_its_own_limit_cut_is_told_so(fake_llm: Any) -> None:
    talk = Talk(fake_llm, terminal=True)
    shown = talk.say("/set max_tokens 2", "one")
    assert "2 tokens, " in shown
    assert ", cut by max_tokens\n" in shown


def test_a_refused_question_is_reported_and_forgotten(fake_llm: Any) -> None:
    talk = Talk(fake_llm)
    assert talk.say("word " * 70, "one") == "Hello there.\n"
    assert talk.noted.getvalue().startswith("error: The message has 72 tokens, and the context")
    assert talk.said == ["one", "Hello there."]
    assert not talk.all_answered


def test_an_error_that_a_person_has_seen_is_not_the_exit_code(fake_llm: Any) -> None:
    talk = Talk(fake_llm, terminal=True)
    talk.say("word " * 70)
    assert talk.all_answered


def test_at_the_end_of_the_context_the_oldest_turns_are_left_out_with_a_note(
    fake_llm: Any,
) -> None:
    talk = Talk(fake_llm)
    talk.say("/system Be brief", *(f"{number} {'word ' * 9}" for number in range(6)))
    # 48 tokens beside the answer's 16: the system text, two turns of 14 tokens, and a question.
    assert [len(asked) for asked in fake_llm.asked] == [2, 4, 6, 6, 6, 6]
    for asked in fake_llm.asked:
        assert asked[0] == {"role": "system", "content": "Be brief"}
    assert fake_llm.asked[5][1]["content"].startswith("3 ")
    told = "left out: the context holds 64 tokens.\n"
    assert talk.noted.getvalue() == (
        f"The oldest turn is {told}The oldest 2 turns are {told}The oldest 3 turns are {told}"
    )
    assert "3 older turns left out" in talk.say("/tokens")
    assert len(talk.session.turns) == 6  # all are kept, and saved


def test_a_message_that_does_not_fit_alone_is_refused_with_the_numbers(fake_llm: Any) -> None:
    talk = Talk(fake_llm)
    talk.say("one", "word " * 70, "two")
    assert talk.noted.getvalue() == (
        "error: The message has 72 tokens, and the context holds 64, the answer included. "
        "Shorten it, or start with a larger --context.\n"
    )
    assert talk.said == ["one", "Hello there.", "two", "Hello there."]


def test_reset_forgets_the_turns_and_keeps_the_system_text(fake_llm: Any) -> None:
    Talk(fake_llm).say("/system Be brief", "one", "/reset", "two")
    assert fake_llm.asked[1] == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "two"},
    ]


def test_the_system_text_is_shown_and_removed_and_the_conversation_goes_on(fake_llm: Any) -> None:
    talk = Talk(fake_llm)
    assert talk.say("one", "/system Be brief", "/system").endswith("Be brief\n")
    talk.say("two")
    assert [message["content"] for message in fake_llm.asked[1]] == [
        *("Be brief", "one", "Hello there.", "two")
    ]
    assert talk.say('/system ""') == "There is no system text.\n"


def test_a_thought_goes_back_to_the_model_as_reasoning(fake_llm: Any) -> None:
    fake_llm.thinks, fake_llm.engine.words = True, "<think>Let me see.</think>Hello there."
    Talk(fake_llm).say("one", "two")
    assert fake_llm.asked[1][1] == {
        "role": "assistant",
        "content": "Hello there.",
        "reasoning_content": "Let me see.",
    }


def test_thoughts_are_dimmed_and_can_be_hidden(fake_llm: Any) -> None:
    fake_llm.thinks, fake_llm.engine.words = True, "<think>Let me see.</think>Hello there."
    talk = Talk(fake_llm, terminal=True)
    assert "\x1b[2mLet me see.\x1b[0m\n\nHello there.\n" in talk.say("one")
    assert "Let me see" not in talk.say("/set thoughts hidden", "two")


@pytest.mark.parametrize(("word", "asked"), [("on", True), ("off", False), ("auto", None)])
def test_the_model_can_be_told_to_think(word: str, asked: bool | None, fake_llm: Any) -> None:
    Talk(fake_llm).say(f"/set think {word}", "one")
    assert fake_llm.chats[0].thinking.enabled is asked


def test_set_changes_how_the_next_answer_is_drawn_and_default_sets_it_back(fake_llm: Any) -> None:
    talk = Talk(fake_llm)
    shown = talk.say("/set temperature 0.3", "/set top-k=5", "one", "/set temperature default")
    assert shown.startswith("temperature is 0.3.\ntop_k is 5.\n")
    assert shown.endswith("temperature is 0.6.\n")
    assert (fake_llm.params[0].temperature, fake_llm.params[0].top_k) == (0.3, 5)


def test_set_alone_shows_every_setting_and_with_a_name_that_one(fake_llm: Any) -> None:
    lines = Talk(fake_llm).say("/set").splitlines()
    assert {"thoughts", "think", "temperature", "max_tokens"} <= {x.split()[0] for x in lines}
    assert Talk(fake_llm).say("/set top-p").startswith("top_p  1.0  draw from")


def test_regenerate_answers_the_last_question_again_with_another_seed(fake_llm: Any) -> None:
    talk = Talk(fake_llm)
    talk.say("one", "two")
    fake_llm.engine.words = "Good bye."
    assert talk.say("/regenerate") == "Good bye.\n"
    assert fake_llm.asked[2] == fake_llm.asked[1]
    assert [params.seed for params in fake_llm.params] == [1, 2, 3]
    assert talk.said == ["one", "Hello there.", "two", "Good bye."]


def test_an_answer_stays_if_no_other_comes_in_its_place(
    fake_llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = Talk(fake_llm)
    talk.say("/regenerate", "one")
    assert talk.noted.getvalue() == "error: There is no answer to give again.\n"
    for error in (OptionError("full"), KeyboardInterrupt()):
        with monkeypatch.context() as patch:
            patch.setattr(fake_llm, "stream_chat", lambda *_, error=error: raised(error))
            talk.say("/regenerate")
        assert talk.said == ["one", "Hello there."]


def raised(error: BaseException) -> Any:
    raise error


def test_stats_tell_of_the_last_answer_and_of_all(fake_llm: Any) -> None:
    fake_llm.engine.cost = {"hit_rate": 0.875}
    assert (
        Talk(fake_llm)
        .say("one", "two", "/stats")
        .endswith(
            "last answer: first token 500 ms, prompt 7, answer 4 tokens, 8.0 tokens/s, "
            "expert hits 88 %\n"
            "this chat: 2 answers, 10 prompt tokens computed, 8 tokens generated\n"
        )
    )


def test_tokens_tell_how_full_the_context_is(fake_llm: Any) -> None:
    talk = Talk(fake_llm)
    assert talk.say("/tokens") == "0 turns, 0 of 64 tokens (0 % of the context)\n"
    assert talk.say("one", "/tokens").endswith("1 turn, 6 of 64 tokens (9 % of the context)\n")
    assert talk.say("/tokens three short words") == "4 tokens\n"  # with the one that begins a text


def test_a_saved_conversation_goes_on_in_another_chat(fake_llm: Any, tmp_path: Path) -> None:
    first, second = Talk(fake_llm), Talk(fake_llm)
    path = tmp_path / "rivers"
    shown = first.say("/set top_k 7", "one", f"/save {path}", "two", "/save")
    assert shown.count(f"saved in {path}.json.\n") == 2
    assert second.say(f"/load {path}", "three").startswith(f"2 turns loaded from {path}.json.\n")
    assert second.said == ["one", "Hello there.", "two", "Hello there.", "three", "Hello there."]
    assert fake_llm.params[2].top_k == 7
    assert fake_llm.params[2].seed == 3


def test_a_command_line_can_go_on_with_a_saved_conversation(
    opened: list[Options],
    fake_llm: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "rivers.json"
    Talk(fake_llm).say("one", f"/save {path}")
    monkeypatch.setattr("sys.stdin", io.StringIO("two\n"))
    assert run_command(["chat", "--load", str(path.with_suffix("")), "--no-think"]) == 0
    assert [message["content"] for message in fake_llm.asked[1]] == ["one", "Hello there.", "two"]
    missing = tmp_path / "none.json"
    assert run_command(["chat", "--load", str(missing)]) == 2
    assert capsys.readouterr().err == f"error: Cannot read {missing}: {os.strerror(2)}.\n"
    assert len(opened) == 1  # the model was not loaded for it


@pytest.mark.parametrize("command", ["/save", "/load"])
def test_a_command_without_its_file_says_what_is_missing(command: str, fake_llm: Any) -> None:
    talk = Talk(fake_llm)
    talk.say(command)
    assert talk.noted.getvalue() == (
        f"error: {command} needs the name of a file. As in {command} rivers.json.\n"
    )


def test_help_lists_every_command(fake_llm: Any) -> None:
    shown = Talk(fake_llm).say("/help")
    for command in CHAT_COMMANDS:
        assert f"/{command.name}" in shown
    assert "Ctrl-C stops" in shown


def test_the_page_on_the_terminal_explains_every_command_and_setting_of_the_chat() -> None:
    page = (Path(__file__).parents[2] / "docs" / "terminal.md").read_text()
    for word in [*(f"/{command.name}" for command in CHAT_COMMANDS), *CHAT_SETTINGS, *OTHER_NAMES]:
        assert word in page


def test_an_unknown_command_is_refused_with_the_nearest_and_a_path_is_a_message() -> None:
    with pytest.raises(OptionError, match=r"There is no /rest. Did you mean /reset\?"):
        find_command("/rest")
    with pytest.raises(OptionError, match="/help lists"):
        find_command("/xyzzy")
    for message in ("/etc/hosts is what?", "/* a comment */", "/xyz\nwas pasted", "a /set"):
        assert find_command(message) is None
    assert find_command("/SET top_k 3") is find_command("/set\ntop_k 3") is not None


def test_words_of_commands_are_proposed(fake_llm: Any) -> None:
    chat = Talk(fake_llm).chat
    assert "/regenerate" in chat.proposals("")
    assert {"temperature", "thoughts", "stop"} <= set(chat.proposals("/set"))
    assert chat.proposals("/set thoughts") == ["shown", "folded", "hidden", "default"]
    assert chat.proposals("/set ignore_eos") == ["on", "off", "default"]
    assert chat.proposals("/reset") == []


def test_lines_may_come_from_a_pipe(
    opened: list[Options],
    fake_llm: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    assert run_command(["chat", "--temperature", "0"]) == 0
    assert capsys.readouterr() == ("Hello there.\nHello there.\n", "")
    assert fake_llm.params[0].temperature == 0


def test_a_pipe_whose_message_failed_ends_in_an_error(
    opened: list[Options],
    fake_llm: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{'word ' * 70}\ntwo\n"))
    assert run_command(["chat"]) == 1
    assert capsys.readouterr().out == "Hello there.\n"


def test_a_model_without_a_chat_template_is_refused_at_once(
    opened: list[Options], fake_llm: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_llm.template = None
    assert run_command(["chat"]) == 1
    assert capsys.readouterr().err == (
        "error: fake has no chat template. Give it plain prompts: headroom run --raw.\n"
    )


def test_an_answer_cut_by_the_context_has_a_note(fake_llm: Any) -> None:
    talk = Talk(fake_llm)
    talk.say("one")
    assert talk.noted.getvalue() == ""
    fake_llm.engine.words = "word " * 100
    talk.say("one")
    # Of 64 tokens, the prompt has 7: a start, "one", three of an answer, "one" and a line feed.
    assert talk.noted.getvalue().startswith("The answer was cut after 57 tokens, where the context")
