"""The Python API: prompts in, text out."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from headroom import LLM, HeadroomError, Options, SamplingParams
from headroom.engine.request import GenerationRequest, TokenEvent
from headroom.errors import ModelError, OptionError, RequestError
from headroom.llm import model_name
from headroom.text.answer_parser import join_calls
from headroom.text.conversation import Conversation, OutputFormat, Tool
from headroom.text.fill_in import FillIn
from tests.tiny import CHAT_TEMPLATE, llama_config, random_model, save_safetensors

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def llm(tiny_path: Path) -> Iterator[LLM]:
    with LLM(str(tiny_path), context=128, threads=1) as opened:
        yield opened


def test_text_ids_and_lists_of_them_are_prompts(llm: LLM) -> None:
    ids = llm.tokenizer.encode("abc")
    one = llm.generate("abc", GREEDY)
    assert len(one) == 1
    assert llm.generate(ids, GREEDY)[0].text == one[0].text
    several = llm.generate(["abc", ids], GREEDY)
    assert [done.text for done in several] == [one[0].text] * 2


def test_a_stream_adds_up_to_the_answer(llm: LLM) -> None:
    whole = llm.generate("abc", GREEDY)[0]
    pieces = list(llm.stream("abc", GREEDY))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [piece.token for piece in pieces] == list(whole.token_ids)
    assert [piece.finish_reason for piece in pieces] == [None] * 11 + ["length"]
    assert whole.finish_reason == "length"
    assert (whole.prompt_tokens, whole.generated_tokens) == (3, 12)


def test_chat_goes_through_the_models_template(llm: LLM) -> None:
    assert "<|assistant|>" in CHAT_TEMPLATE
    prompt = "<|user|>hi<|end|><|assistant|>"
    assert llm.encode_chat(MESSAGES) == llm.tokenizer.encode(prompt)
    assert llm.chat(MESSAGES, GREEDY).text == llm.generate(prompt, GREEDY)[0].text
    assert "".join(piece.text for piece in llm.stream_chat(MESSAGES, GREEDY)) == (
        llm.chat(MESSAGES, GREEDY).text
    )


def test_a_sampling_setting_among_the_variables_of_a_chat_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="max_tokens is a sampling setting") as caught:
        llm.chat(MESSAGES, template_variables={"max_tokens": 5})
    assert "SamplingParams(max_tokens=...)" in caught.value.hint


ENDLESS = """
import sys
from headroom import LLM, SamplingParams
llm = LLM(sys.argv[1], context=512, threads=1)
stream = llm.stream("abc", SamplingParams(ignore_eos=True))
next(stream)
print("one token")
"""


@pytest.mark.parametrize("ending", ["", "sys.exit(3)"])
def test_a_program_may_end_without_closing_a_model_that_answers(
    tiny_path: Path, ending: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDLESS + ending, str(tiny_path)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == (3 if ending else 0), done.stderr
    assert done.stdout == "one token\n"


def test_more_prompts_than_the_queue_holds_are_all_answered(tiny_path: Path) -> None:
    prompts = ["a", "b", "c", "d", "e"]
    with LLM(str(tiny_path), context=64, parallel=1, queue=1, threads=1) as llm:
        alone = [llm.generate(prompt, GREEDY)[0].text for prompt in prompts]
        assert [done.text for done in llm.generate(prompts, GREEDY)] == alone
        assert len(set(alone)) > 1


def test_a_refused_prompt_ends_the_ones_that_were_given_with_it(llm: LLM) -> None:
    before = llm.engine.stats().requests_finished.get("cancelled", 0)
    endless = SamplingParams(ignore_eos=True)
    with pytest.raises(RequestError, match="prompt has 500 tokens"):
        llm.generate(["a", "b", [1] * 500], endless)
    llm.generate("after", GREEDY)
    assert llm.engine.stats().requests_finished["cancelled"] == before + 2


def test_a_stop_text_ends_the_answer_before_it(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, logit_bias={}, ignore_eos=True, seed=1)
    whole = llm.generate("abc", params)[0].text
    stop = next(c for c in whole[1:] if c.isprintable() and c != "\ufffd")
    cut = llm.generate("abc", SamplingParams(temperature=0, max_tokens=60, stop=(stop,)))[0]
    assert cut.finish_reason == "stop"
    assert cut.text == whole[: whole.index(stop)]


def test_a_folder_of_safetensors_runs_like_its_gguf(llm: LLM, tmp_path: Path) -> None:
    model = random_model(llama_config(tie_word_embeddings=False))
    folder = save_safetensors(model, tmp_path / "Tiny-Folder")
    with LLM(str(folder), context=128, threads=1) as other:
        assert other.name == "tiny-folder"
        ours = llm.generate("abc", GREEDY)[0].token_ids
        assert other.generate("abc", GREEDY)[0].token_ids == ours
        assert other.chat(MESSAGES, GREEDY).token_ids == llm.chat(MESSAGES, GREEDY).token_ids


def test_chatting_with_a_model_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    folder = save_safetensors(random_model(llama_config()), tmp_path / "m")
    (folder / "chat_template.jinja").unlink()
    refused = pytest.raises(ModelError, match=r"m has no chat template.*--raw")
    with LLM(str(folder), context=64, threads=1) as other, refused:
        other.chat(MESSAGES)


def test_names_are_known_ones_or_the_files() -> None:
    assert model_name("", Path("/x/SmolLM2-135M-Instruct.Q4_1.gguf")) == "smollm2-135m-instruct"
    assert model_name("smollm2", Path("/x/y.gguf")) == "smollm2-135m-instruct"
    assert model_name("/x/My-Model", Path("/x/My-Model")) == "my-model"


def test_an_unknown_setting_is_an_error() -> None:
    with pytest.raises(OptionError, match="Unknown setting 'contxt'"):
        LLM("x.gguf", contxt=3)


def test_a_missing_model_is_a_headroom_error() -> None:
    with pytest.raises(HeadroomError, match="no file, folder or known model"):
        LLM("no-such-model.gguf")
    with pytest.raises(HeadroomError, match=r"qwen3-0\.6b is a name for plans"):
        LLM("qwen3-0.6b")


def test_options_can_be_given_whole(tiny_path: Path) -> None:
    with LLM(options=Options(model=str(tiny_path), context=64, threads=1)) as llm:
        assert llm.context == 64
        assert llm.vocab_size == 320


def test_empty_messages_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError):
        llm.chat([])


def test_equal_prompts_have_answers_of_their_own_and_a_seed_repeats_them(llm: LLM) -> None:
    params = SamplingParams(seed=5, max_tokens=12, ignore_eos=True)
    answers = [done.token_ids for done in llm.generate(["abc"] * 4, params)]
    assert len(set(answers)) == 4
    assert [done.token_ids for done in llm.generate(["abc"] * 4, params)] == answers


def test_without_settings_the_models_own_hold(tmp_path: Path) -> None:
    config = llama_config()
    save_safetensors(random_model(config), tmp_path)
    (tmp_path / "generation_config.json").write_text(
        '{"temperature": 0.25, "top_k": 3, "eos_token_id": 256}'
    )
    with LLM(str(tmp_path), context=64, threads=1) as llm:
        assert llm.default_sampling == {"temperature": 0.25, "top_k": 3}
        params = llm.sampling(max_tokens=4, seed=9)
        assert params == SamplingParams(temperature=0.25, top_k=3, max_tokens=4, seed=9)
        assert llm.sampling().seed != llm.sampling().seed
        assert llm.sampling(temperature=0).temperature == 0


def test_a_model_that_recommends_impossible_settings_is_refused(tmp_path: Path) -> None:
    save_safetensors(random_model(llama_config()), tmp_path)
    (tmp_path / "generation_config.json").write_text('{"top_p": 7}')
    with pytest.raises(ModelError, match=r"top_p is 7.0; it must be from 0 to 1"):
        LLM(str(tmp_path), context=64, threads=1)


def test_an_answer_matches_the_schema_that_was_given(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}},
              "required": ["n"], "additionalProperties": False}  # fmt: skip
    answer = llm.chat(MESSAGES, SamplingParams(seed=1, max_tokens=60), schema=schema)
    assert answer.finish_reason == "stop"
    value = json.loads(answer.text)
    assert set(value) == {"n"}
    assert isinstance(value["n"], int)


def test_raw_answers_match_a_schema_or_a_format_that_was_given(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}},
              "required": ["n"], "additionalProperties": False}  # fmt: skip
    params = SamplingParams(seed=1, max_tokens=60)
    first, second = llm.generate(["One:", "Two:"], params, schema=schema)
    assert set(json.loads(first.text)) == set(json.loads(second.text)) == {"n"}
    choice = OutputFormat(kind="choice", value=["yes", "no"])
    assert llm.generate("Is it?", params, output_format=choice)[0].text in ("yes", "no")
    pieces = llm.stream("Is it?", params, output_format=choice)
    assert "".join(piece.text for piece in pieces) in ("yes", "no")


def test_a_gap_is_filled_only_by_a_model_that_has_tokens_for_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RequestError, match="no tokens for filling in the middle"):
        llm.generate("def f(", GREEDY, suffix="return 1")
    tokens = FillIn(prefix=3, suffix=4, middle=5, stop_ids=frozenset({7}))
    monkeypatch.setattr(llm, "fill_in", tokens)
    asked: list[GenerationRequest] = []
    submit = llm.engine.submit

    def note(request: GenerationRequest, on_event: Callable[[TokenEvent], None]) -> None:
        asked.append(request)
        submit(request, on_event)

    monkeypatch.setattr(llm.engine, "submit", note)
    llm.generate("def f(", GREEDY, suffix="return 1")
    (request,) = asked
    assert list(request.prompt) == tokens.prompt(llm.tokenizer, "def f(", "return 1")
    assert request.stop_ids == llm.tokenizer.stop_ids | {7}


def test_an_answer_in_a_format_is_not_mistaken_for_a_call(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    tools, text = (Tool(name="f"),), '{"name": "f"}'
    formats = (None, OutputFormat(kind="json_schema", value=schema))
    for output_format, calls in zip(formats, (1, 0), strict=True):
        chat = Conversation(messages=MESSAGES, tools=tools, output_format=output_format)
        parser = llm.prepare_chat(chat).new_parser()
        parts = parser.push(text) + parser.finish()
        assert (len(join_calls(parts.calls)), parts.text) == (calls, "" if calls else text)


def test_a_tool_that_must_be_called_is_called_and_replayed(tmp_path: Path) -> None:
    config = llama_config(max_position_embeddings=2048)
    folder = save_safetensors(random_model(config), tmp_path)
    tool = {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather.",
            "parameters": {
                "type": "object",
                "properties": {"day": {"enum": ["today", "tomorrow"]}},
                "required": ["day"],
                "additionalProperties": False,
            },
        },
    }
    params = SamplingParams(seed=1, max_tokens=110)
    with LLM(str(folder), context=2048, threads=1) as llm:
        answer = llm.chat(MESSAGES, params, tools=[tool], tool_choice="required")
        (call,) = answer.tool_calls
        assert call.name == "weather"
        assert json.loads(call.arguments)["day"] in ("today", "tomorrow")
        with pytest.raises(RequestError, match="not an object with the name of a function"):
            llm.chat(MESSAGES, tools=[{"type": "function"}])
        before = llm.prepare_chat(
            Conversation(messages=MESSAGES, tools=(Tool(**tool["function"]),))
        )
        function = {"name": call.name, "arguments": call.arguments}
        history = [
            *MESSAGES,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": call.id, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": call.id, "content": "rain"},
        ]
        after = llm.prepare_chat(Conversation(messages=history, tools=(Tool(**tool["function"]),)))
        start = (*before.tokens, *answer.token_ids)
        assert after.tokens[: len(start)] == start


def test_weights_that_are_not_numbers_end_an_answer_with_a_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = random_model(llama_config(tie_word_embeddings=False))
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    path = save_safetensors(model, tmp_path / "broken")
    with LLM(str(path), context=64, threads=1) as llm, pytest.raises(HeadroomError) as raised:
        llm.generate("abc", SamplingParams(max_tokens=2))
    assert str(raised.value).startswith(
        "The engine failed: The model computed logits that are not finite: the largest is nan."
    )
    assert not str(raised.value).endswith("..")
    assert not any(record.exc_info for record in caplog.records), "no traceback for a broken file"
