"""A conversation with a small model of every family: prompt, stop tokens, thoughts, answer."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headroom import LLM, Options, SamplingParams
from headroom.cli.main import run_command
from headroom.families.registry import FAMILIES, RUNNABLE
from headroom.families.synth.recipe import find_recipe
from headroom.families.synth.values import Source
from headroom.families.synth.write import write_gguf
from tests.families.oracles import oracle_greedy, variant
from tests.server.fakes import serving

CASES = [(name, size) for name in RUNNABLE for size in FAMILIES[name].synthesis.tiny]
CHAT = [{"role": "user", "content": "What would the people say?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
IM_END, EOS = "<|im_end|>", "\u3008|EOS|\u3009"
# What prompts begin and end with, the tokens that end an answer, and the marks of a thought.
SPEECH: dict[str, tuple[str, str, set[str], tuple[str, str] | None]] = {
    "llama": ("<|im_start|>user\n", "<|im_start|>assistant\n", {IM_END}, None),
    "qwen3": (
        "<|im_start|>user\n",
        "assistant\n",
        {IM_END, "<|endoftext|>"},
        ("<think>", "</think>"),
    ),
    "mistral3": ("<s>[INST]", "[/INST]", {"</s>"}, None),
    "laguna": (
        f"{EOS}<user>\n",
        "<assistant>\n</think>",
        {EOS, "</assistant>"},
        ("<think>", "</think>"),
    ),
    "smollm3": (
        "<|im_start|>user\n",
        "<|im_start|>assistant\n",
        {IM_END},
        ("<think>", "</think>"),
    ),
    "glm4moe": (
        "[gMASK]<sop><|user|>\n",
        "<|assistant|>\n",
        {"<|endoftext|>", "<|user|>"},
        ("<think>", "</think>"),
    ),
    "gpt-oss": (
        "<|start|>user<|message|>",
        "<|start|>assistant",
        {"<|return|>", "<|call|>"},
        None,
    ),
    "gemma3": (
        "<bos><start_of_turn>user\n",
        "<start_of_turn>model\n",
        {"<eos>", "<end_of_turn>"},
        None,
    ),
    "gemma4": (
        "<bos><|turn>user\n",
        "<|turn>model\n<|channel>thought\n<channel|>",
        {"<eos>", "<turn|>"},
        ("<|channel>thought\n", "<channel|>"),
    ),
}
SPEECH["qwen3moe"] = SPEECH["qwen3"]
SPEECH["qwen35"] = SPEECH["qwen35moe"] = (
    "<|im_start|>user\n",
    "assistant\n<think>\n",
    *SPEECH["qwen3"][2:],
)


def synthesised(folder: Path, family: str, size: str = "tiny") -> Path:
    path = folder / f"{family}.gguf"
    write_gguf(Source(find_recipe(family, size), 0), path, "q8_0")
    return path


@pytest.mark.parametrize(("family", "size"), CASES)
def test_a_conversation_goes_by_the_family_s_own_marks(
    family: str, size: str, tmp_path: Path
) -> None:
    start, end, stops, marks = SPEECH[family]
    with LLM(str(synthesised(tmp_path, family, size)), context=128, threads=2) as llm:
        ids = llm.encode_chat(CHAT)
        prompt = llm.tokenizer.decode(ids)
        assert prompt.startswith(start + CHAT[0]["content"])
        assert prompt.endswith(end)
        bos = llm.tokenizer.find(llm.tokenizer.bos_token)
        assert ids[:2] != [bos, bos]  # the template's own, not another one before it
        assert stops <= {llm.tokenizer.decode([token]) for token in llm.tokenizer.stop_ids}
        found = llm.reasoning
        assert (None if found is None else (found.start, found.end)) == marks
        # Prompts of Qwen3.5 end inside a thought if nothing else is asked for.
        assert (found is not None and found.opened) == family.startswith("qwen35")
        done = llm.chat(CHAT, GREEDY)
        assert (done.prompt_tokens, done.generated_tokens) == (len(ids), 12)
        again = llm.generate([ids], GREEDY)[0]
        assert done.token_ids == again.token_ids
        # An answer that begins inside a thought and never ends it is all thought.
        assert (done.thought if found and found.opened else done.text) == again.text.strip()


@pytest.mark.parametrize("family", ["qwen35moe", "gemma4"])
def test_a_stop_token_of_the_family_ends_an_answer(family: str, tmp_path: Path) -> None:
    with LLM(str(synthesised(tmp_path, family)), context=128, threads=2) as llm:
        ids = llm.encode_chat(CHAT)
        free = llm.generate([ids], GREEDY)[0].token_ids
        for token in sorted(llm.tokenizer.stop_ids):
            bias = {token: 100.0}
            params = SamplingParams(temperature=0, max_tokens=12, logit_bias=bias)
            done = llm.generate([ids], params)[0]
            assert (done.finish_reason, done.text) == ("stop", "")
        assert len(free) == 12


@pytest.fixture(params=["qwen35moe", "laguna"])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[httpx.Client]:
    """A server over a small model."""
    path = str(synthesised(tmp_path, request.param))
    with (
        LLM(path, context=256, threads=2) as llm,
        serving(llm, Options(port=0)) as server,
        httpx.Client(base_url=server.address, timeout=60) as http,
    ):
        yield http


ASKED = {"messages": CHAT, "max_tokens": 16, "temperature": 0, "ignore_eos": True}


def whole_and_streamed(client: httpx.Client) -> tuple[str, str]:
    """Return thought and content of a chat's answer, asked for at once and as a stream."""
    answer = client.post("/v1/chat/completions", json=ASKED)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert answer.json()["usage"]["completion_tokens"] == 16
    events = client.post("/v1/chat/completions", json=ASKED | {"stream": True}).text.split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if "{" in event]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    message = choice["message"]
    whole = (message.get("reasoning_content") or "") + (message["content"] or "")
    parts = ("reasoning_content", "content")
    return whole, "".join(delta.get(part) or "" for delta in deltas for part in parts)


def test_a_server_answers_a_chat_and_streams_the_same(client: httpx.Client) -> None:
    whole, streamed = whole_and_streamed(client)
    assert whole == streamed != ""


@pytest.mark.parametrize("name", ["llama", "qwen35moe", "laguna", "gemma4-e4b"])
def test_a_server_answers_and_streams_the_greedy_tokens_of_transformers(
    name: str, tmp_path: Path
) -> None:
    model = variant(name)
    exact: dict[str, Any] = {"dtype": "f32", "kv_type": "f32", "context": 256, "threads": 2}
    with (
        LLM(str(model.save_safetensors(tmp_path)), **exact) as llm,
        serving(llm, Options(port=0)) as server,
        httpx.Client(base_url=server.address, timeout=60) as http,
    ):
        tokens = oracle_greedy(model.model(), llm.encode_chat(CHAT), 16)
        assert len(set(tokens)) > 1
        assert whole_and_streamed(http) == (llm.tokenizer.decode(tokens),) * 2


@pytest.mark.parametrize("family", sorted(RUNNABLE))
def test_run_answers_as_the_plain_kernels_do_with_every_family(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(synthesised(tmp_path, family))
    exact = ["--dtype", "f32", "--kv-type", "f32", "--context", "128"]
    words = ["Why?", "--max-tokens", "6", "--temperature", "0", "--ignore-eos", *exact]
    assert run_command(["run", path, *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    plain: dict[str, Any] = {"kernels": "reference", "dtype": "f32", "kv_type": "f32"}
    with LLM(path, context=128, **plain) as llm:
        wanted = llm.chat([{"role": "user", "content": "Why?"}], params)
    assert found["token_ids"] == list(wanted.token_ids)
    assert found["text"] == wanted.text
    assert found["usage"]["completion_tokens"] == len(found["token_ids"]) == 6
