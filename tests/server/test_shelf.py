"""Several models on one server: which are loaded and unloaded, and who answers."""

import asyncio
import gc
import json
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from headroom.engine.request import SamplingParams
from headroom.errors import FormatError
from headroom.llm import LLM
from headroom.machine import targets
from headroom.options import Options
from headroom.server.model_card import ModelCard
from headroom.server.refusals import RefusalError
from headroom.server.shelf import NEVER, Shelf, ShelvedModel
from headroom.units import parse_size
from tests.server.fakes import events_of, serving, wait_until
from tests.synth_models import write_model
from tests.tiny import llama_config, random_model, save_gguf

QUESTION = [{"role": "user", "content": "Name a colour."}]
CHAT = "/v1/chat/completions"
# 256 MiB and a sixteenth are kept free. Of the rest tiny takes 1.5 MiB, llama 5.8, qwen3 8.2.
ROOM_FOR_QWEN3 = "282.4MiB"  # 8.8 MiB: qwen3 alone, or the two others
ROOM_FOR_TWO = "283.8MiB"  # 10.1 MiB: tiny and one of the others
ROOM_FOR_TINY = "276MiB"
SETTINGS: dict[str, Any] = {
    "device": "cpu", "context": 256, "parallel": 2, "threads": 1, "port": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three models; the first has another vocabulary than the others."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "tiny": save_gguf(random_model(llama_config()), folder / "tiny.gguf"),
        "qwen3": write_model("qwen3", "q8_0", folder, few_layers=True),
        "llama": write_model("llama", "q8_0", folder, few_layers=True),
    }


@pytest.fixture(scope="module")
def alone(models: dict[str, Path]) -> dict[str, str]:
    """What each model answers if nothing else is loaded."""
    said = {}
    for name, path in models.items():
        with LLM(str(path), **{**SETTINGS, "port": None}) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=24)
            said[name] = llm.generate([llm.encode_chat(QUESTION)], params)[0].text
    assert len(set(said.values())) == len(said)
    return said


class Loads:
    """Opens models and remembers them, so that a test can hold up loads and see leaks."""

    def __init__(self) -> None:
        # The parts of each model that hold memory.
        self.opened: list[tuple[str, list[weakref.ref[Any]]]] = []
        self.may_go = threading.Event()
        self.may_go.set()
        self.fails = ""  # the name of a model whose load fails

    def __call__(self, **arguments: Any) -> LLM:
        name = arguments["path"].stem.partition("-")[0]
        assert self.may_go.wait(20)
        if name == self.fails:
            raise FormatError("The disk has a bad sector.")
        llm = LLM(**arguments)
        parts = (llm, llm.engine, llm.engine._pipeline, llm.engine._pipeline._stages[0])
        self.opened.append((name, [weakref.ref(part) for part in parts]))
        return llm

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.opened]

    def alive(self) -> list[str]:
        gc.collect()
        return [name for name, parts in self.opened if any(part() is not None for part in parts)]


@pytest.fixture
def loads() -> Loads:
    return Loads()


class Server:
    """A server over a shelf, and a client of it."""

    def __init__(self, shelf: Shelf, http: httpx.Client) -> None:
        self.shelf = shelf
        self.http = http

    def ask(self, model: str | None, **more: Any) -> httpx.Response:
        body = {"messages": QUESTION, "temperature": 0, "max_tokens": 24, "model": model, **more}
        return self.http.post(CHAT, json=body)

    def text(self, model: str | None) -> str:
        response = self.ask(model)
        assert response.status_code == 200, response.text
        text = response.json()["choices"][0]["message"]["content"]
        assert isinstance(text, str)
        return text

    def loaded(self) -> list[str]:
        return [shelved.name for shelved in self.shelf.models if shelved.llm is not None]


@pytest.fixture
def serve(models: dict[str, Path], loads: Loads) -> Iterator[Any]:
    """Starts servers of some of the models."""
    with ExitStack() as stack:

        def start(*names: str, **changes: Any) -> Server:
            options = Options(**{**SETTINGS, **changes})
            chosen = {name: models[name] for name in names}
            shelf = stack.enter_context(Shelf.of_files(chosen, options, loads))
            shelf.load_first()
            server = stack.enter_context(serving(shelf, options))
            http = stack.enter_context(httpx.Client(base_url=server.address, timeout=30))
            return Server(shelf, http)

        yield start


def test_the_first_model_is_loaded_at_start_and_others_when_they_are_asked_for(
    serve: Any, alone: dict[str, str]
) -> None:
    server = serve("tiny", "qwen3")
    assert server.loaded() == ["tiny"]
    assert server.text("qwen3") == alone["qwen3"]
    assert server.text("tiny") == alone["tiny"]
    assert server.text(None) == alone["tiny"]
    assert server.loaded() == ["tiny", "qwen3"]


def test_threads_that_ask_three_models_in_turn_get_each_models_own_answers(
    serve: Any, alone: dict[str, str], loads: Loads
) -> None:
    server = serve("tiny", "qwen3", "llama", ram=ROOM_FOR_QWEN3)
    asked = [["tiny", "qwen3", "llama"][number % 3] for number in range(18)]
    with ThreadPoolExecutor(6) as pool:
        said = list(pool.map(server.text, asked))
    assert said == [alone[name] for name in asked]
    assert server.loaded() == ["qwen3"] or "qwen3" not in server.loaded()
    assert len(loads.names) > 3  # some of them were loaded again
    wait_until(lambda: sorted(loads.alive()) == sorted(server.loaded()))


def test_a_model_takes_the_place_of_those_used_longest_ago_until_it_fits(
    serve: Any, loads: Loads
) -> None:
    server = serve("tiny", "llama", "qwen3", ram=ROOM_FOR_TWO)
    server.text("llama")
    server.text("tiny")
    assert server.loaded() == ["tiny", "llama"]
    server.text("qwen3")
    assert server.loaded() == ["tiny", "qwen3"]
    wait_until(lambda: loads.alive() == ["tiny", "qwen3"])


def test_a_model_is_not_unloaded_while_it_answers(serve: Any, alone: dict[str, str]) -> None:
    server = serve("tiny", "qwen3", ram=ROOM_FOR_QWEN3)
    body = {"messages": QUESTION, "model": "tiny", "stream": True, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        with server.http.stream("POST", CHAT, json={**body, "max_tokens": 150}) as stream:
            lines = stream.iter_lines()
            next(lines)
            other = pool.submit(server.text, "qwen3")
            wait_until(lambda: server.shelf.models[0].leaving)
            assert server.shelf.models[0].llm is not None
            rest = "\n".join(lines)
        assert "data: [DONE]" in rest
        assert '"finish_reason":"length"' in rest
        assert other.result() == alone["qwen3"]
    assert server.loaded() == ["qwen3"]


def test_a_model_that_can_never_fit_is_refused_with_the_numbers_and_the_others_stay(
    serve: Any, alone: dict[str, str], loads: Loads
) -> None:
    server = serve("tiny", "qwen3", ram=ROOM_FOR_TINY)
    response = server.ask("qwen3")
    assert response.status_code == 503
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_loaded", "model")
    assert "'qwen3' cannot be loaded" in error["message"]
    assert "MiB" in error["message"] or "GiB" in error["message"]
    assert server.text("tiny") == alone["tiny"]
    assert loads.names == ["tiny"]
    shown = server.http.get("/v1/models/qwen3").json()
    assert shown["context_length"] is None
    assert shown["error"] in error["message"] or error["message"].endswith(shown["error"])


class HostMemory:
    """The memory of the host that is available, as a test wants it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.available_bytes = total = parse_size(ROOM_FOR_TWO, "ram")
        found = targets.detect_cpu()
        monkeypatch.setattr(
            targets,
            "detect_cpu",
            lambda: replace(found, available_bytes=self.available_bytes, total_bytes=total),
        )

    def set(self, size: str) -> None:
        self.available_bytes = parse_size(size, "ram")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> HostMemory:
    return HostMemory(monkeypatch)


@pytest.mark.parametrize(
    ("room", "together"), [(ROOM_FOR_TWO, ["tiny", "qwen3"]), (ROOM_FOR_QWEN3, ["qwen3"])]
)
def test_a_model_that_did_not_fit_at_start_is_loaded_once_there_is_memory(
    serve: Any, alone: dict[str, str], memory: HostMemory, room: str, together: list[str]
) -> None:
    memory.set(ROOM_FOR_TINY)
    server = serve("tiny", "qwen3")
    assert server.ask("qwen3").status_code == 503
    assert server.http.get("/v1/models/qwen3").json()["context_length"] is None
    memory.set(room)
    assert server.text("qwen3") == alone["qwen3"]
    assert server.loaded() == together
    shown = server.http.get("/v1/models/qwen3").json()
    assert (shown["context_length"], "error" in shown) == (256, False)
    assert server.text("tiny") == alone["tiny"]


def test_nothing_is_unloaded_for_a_model_that_no_longer_fits(
    serve: Any, memory: HostMemory, loads: Loads
) -> None:
    memory.set(ROOM_FOR_QWEN3)
    server = serve("tiny", "qwen3")
    memory.set("270MiB")  # another program has taken memory
    refused = server.ask("qwen3")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_not_loaded")
    assert server.loaded() == ["tiny"]
    assert loads.names == ["tiny"]
    memory.set(ROOM_FOR_QWEN3)
    assert server.ask("qwen3").status_code == 200


def test_a_load_that_fails_is_reported_to_all_who_wait_and_is_tried_again(
    serve: Any, alone: dict[str, str], loads: Loads
) -> None:
    server = serve("tiny", "qwen3")
    loads.fails = "qwen3"
    with ThreadPoolExecutor(3) as pool:
        failed = list(pool.map(server.ask, ["qwen3"] * 3))
    assert [response.status_code for response in failed] == [500] * 3
    assert "The disk has a bad sector." in failed[0].json()["error"]["message"]
    assert server.http.get("/health").status_code == 200
    assert server.text("tiny") == alone["tiny"]
    loads.fails = ""
    assert server.text("qwen3") == alone["qwen3"]


def test_others_are_answered_while_a_model_is_loaded_and_all_who_want_it_share_one_load(
    serve: Any, alone: dict[str, str], loads: Loads
) -> None:
    server = serve("tiny", "qwen3")
    loads.may_go.clear()
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(server.text, "qwen3") for _ in range(3)]
        wait_until(lambda: server.shelf.models[1].loading is not None)
        assert server.text("tiny") == alone["tiny"]
        assert not any(future.done() for future in waiting)
        loads.may_go.set()
        assert [future.result() for future in waiting] == [alone["qwen3"]] * 3
    assert loads.names == ["tiny", "qwen3"]


def test_a_stream_gets_comments_while_its_model_is_loaded(
    serve: Any, alone: dict[str, str], loads: Loads
) -> None:
    server = serve("tiny", "qwen3", keep_alive=0.05)
    loads.may_go.clear()
    body = {"messages": QUESTION, "model": "qwen3", "stream": True}
    with server.http.stream("POST", CHAT, json={**body, "temperature": 0, "max_tokens": 24}) as got:
        assert got.status_code == 200
        assert got.headers["content-type"].startswith("text/event-stream")
        pieces = got.iter_text()
        assert next(pieces).startswith(": keep-alive\n\n")
        loads.may_go.set()
        events = events_of("".join(pieces))
    said = [event["choices"][0]["delta"].get("content", "") for event in events[:-1]]
    assert "".join(said) == alone["qwen3"]
    assert events[-1] == "[DONE]"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/api/chat", {"messages": QUESTION}, "message"),
        ("/api/generate", {"prompt": "x"}, "response"),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_a_stream_of_lines_gets_empty_lines_while_its_model_is_loaded(
    serve: Any, loads: Loads, path: str, body: dict[str, Any], field: str, fails: bool
) -> None:
    server = serve("tiny", "qwen3", keep_alive=0.05)
    loads.may_go.clear()
    loads.fails = "qwen3" if fails else ""
    asked = {**body, "model": "qwen3", "options": {"num_predict": 3}}
    with server.http.stream("POST", path, json=asked) as got:
        assert (got.status_code, got.headers["content-type"]) == (200, "application/x-ndjson")
        lines = got.iter_lines()
        first = json.loads(next(lines))
        loads.may_go.set()
        rest = [json.loads(line) for line in lines]
    empty = {"role": "assistant", "content": ""} if field == "message" else ""
    assert (first[field], first["done"], first["model"]) == (empty, False, "qwen3")
    if fails:
        assert set(rest[-1]) == {"error"}
        assert "bad sector" in rest[-1]["error"]
    else:
        assert (rest[-1]["done"], rest[-1]["eval_count"]) == (True, 3)


@pytest.mark.parametrize("fails", [False, True])
def test_a_stream_of_responses_gets_events_while_its_model_is_loaded(
    serve: Any, loads: Loads, fails: bool
) -> None:
    server = serve("tiny", "qwen3", keep_alive=0.05)
    loads.may_go.clear()
    if fails:
        loads.fails = "qwen3"
    body = {"input": "hi", "model": "qwen3", "stream": True, "max_output_tokens": 4}
    with server.http.stream("POST", "/v1/responses", json=body) as got:
        assert got.headers["content-type"].startswith("text/event-stream")
        pieces = got.iter_text()
        first = next(pieces)
        loads.may_go.set()
        lines = (first + "".join(pieces)).splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    types = [event["type"].removeprefix("response.") for event in events]
    assert types[:2] == ["created", "in_progress"]
    assert types.count("created") == 1
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1
    if fails:
        assert types[-2:] == ["error", "failed"]
        assert "bad sector" in events[-2]["message"]
        assert "bad sector" in events[-1]["response"]["error"]["message"]
    else:
        assert types[-1] in ("completed", "incomplete")
        assert events[-1]["response"]["seed"] is not None
        assert "output_item.added" in types


def test_a_load_that_fails_after_comments_ends_the_stream_with_an_error_event(
    serve: Any, loads: Loads
) -> None:
    server = serve("tiny", "qwen3", keep_alive=0.05)
    loads.may_go.clear()
    loads.fails = "qwen3"
    body = {"messages": QUESTION, "model": "qwen3", "stream": True}
    with server.http.stream("POST", CHAT, json=body) as got:
        pieces = got.iter_text()
        first = next(pieces)
        loads.may_go.set()
        text = first + "".join(pieces)
    last = text.strip().split("\n\n")[-1]
    assert last.startswith("event: error\ndata: {")
    assert "bad sector" in last


def test_an_idle_model_is_unloaded_and_loaded_again_when_it_is_asked_for(
    serve: Any, alone: dict[str, str], loads: Loads
) -> None:
    server = serve("tiny", idle_unload=0.2)
    wait_until(lambda: loads.alive() == [])
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.get("/v1/models").json()["data"][0]["loaded"] is False
    assert server.text("tiny") == alone["tiny"]
    assert loads.names == ["tiny", "tiny"]
    wait_until(lambda: loads.alive() == [])


@pytest.mark.parametrize("devices", [{"device": "cpu,cpu"}, {"workers": "2", "device": None}])
def test_a_model_that_was_idle_is_shared_among_the_same_devices_again(
    serve: Any, alone: dict[str, str], loads: Loads, devices: dict[str, Any]
) -> None:
    server = serve("tiny", idle_unload=0.2, **devices)
    wait_until(lambda: server.loaded() == [])
    server.shelf.keep(server.shelf.models[0], NEVER)
    assert server.text("tiny") == alone["tiny"]
    (shelved,) = server.shelf.models
    assert shelved.llm is not None
    assert loads.names == ["tiny", "tiny"]
    assert shelved.llm.options.workers == devices.get("workers")
    assert len(shelved.llm.plan.devices) == 2


@pytest.mark.slow
def test_workers_run_one_model_at_a_time(serve: Any, alone: dict[str, str]) -> None:
    server = serve("tiny", "llama", workers="2", device=None)
    assert server.text("llama") == alone["llama"]
    assert server.loaded() == ["llama"]


def test_a_load_ends_when_the_server_stops(serve: Any, loads: Loads) -> None:
    server = serve("tiny", "qwen3")
    loads.may_go.clear()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.ask, "qwen3")
        wait_until(lambda: server.shelf.models[1].loading is not None)
        server.shelf.stop()
        loads.may_go.set()
        refused = waiting.result()
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "shutting_down"
    wait_until(lambda: loads.alive() == ["tiny"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": QUESTION, "stream": True}),
        ("/v1/completions", {"prompt": "one"}),
        ("/v1/responses", {"input": "one", "stream": True}),
        ("/v1/responses", {"input": "one"}),
        ("/v1/messages", {"messages": QUESTION, "max_tokens": 8}),
        ("/v1/embeddings", {"input": "one"}),
        ("/api/chat", {"messages": QUESTION}),
        ("/tokenize", {"content": "one"}),
    ],
)
def test_no_api_keeps_a_model_in_memory_after_its_answer(
    serve: Any, loads: Loads, path: str, body: dict[str, Any]
) -> None:
    server = serve("tiny", "qwen3", ram=ROOM_FOR_QWEN3)
    asked = server.http.post(path, json={"model": "tiny", **body})
    assert asked.status_code == 200, asked.text
    server.text("qwen3")
    wait_until(lambda: loads.alive() == ["qwen3"])


def test_models_are_listed_with_context_and_size_and_unknown_names_get_the_list(
    serve: Any, models: dict[str, Path]
) -> None:
    server = serve("tiny", "qwen3")
    data = server.http.get("/v1/models").json()["data"]
    assert [(entry["id"], entry["loaded"]) for entry in data] == [("tiny", True), ("qwen3", False)]
    assert all(entry["context_length"] == 256 for entry in data)
    for entry in data:
        size = models[entry["id"]].stat().st_size
        assert 0.7 * size < entry["size_bytes"] <= size
        assert server.http.get(f"/v1/models/{entry['id']}").json() == entry
    missing = server.ask("gpt-6")
    assert missing.status_code == 404
    assert "'tiny', 'qwen3'" in missing.json()["error"]["message"]
    for name in ("Qwen3:latest", "qwen3.gguf", "qwen3.gguf:latest"):
        answer = server.ask(name)
        assert (answer.status_code, answer.json()["model"]) == (200, "qwen3")


def test_metrics_name_the_model_if_there_are_several(serve: Any) -> None:
    server = serve("tiny", "qwen3")
    server.text("qwen3")
    server.text("qwen3")
    lines = server.http.get("/metrics").text.splitlines()
    assert 'headroom_requests_finished_total{model="qwen3",reason="length"} 2.0' in lines
    assert 'headroom_steps_total{model="tiny"} 0.0' in lines
    assert sum(line.startswith("# TYPE headroom_steps_total") for line in lines) == 1


def test_each_model_reports_the_memory_of_its_own_engine(serve: Any) -> None:
    server = serve("tiny", "qwen3")

    def used(name: str) -> float:
        found = [
            line.split()[1]
            for line in server.http.get("/metrics").text.splitlines()
            if line.startswith(f'headroom_memory_used_bytes{{device="cpu",model="{name}"}}')
        ]
        return float(found[0])

    alone = used("tiny")
    server.text("qwen3")
    assert used("tiny") == alone
    listed = {model["name"]: model for model in server.http.get("/api/ps").json()["models"]}
    for shelved in server.shelf.models:
        size = sum(shelved.llm.engine._pipeline.allocated.values())
        assert 0.9 * sum(shelved.taken.values()) < size <= sum(shelved.taken.values())
        assert used(shelved.name) == listed[f"{shelved.name}:latest"]["size"] == size
        shown = server.http.get("/props", params={"model": shelved.name}).json()
        assert shown["runtime"]["memory_bytes"] == {"cpu": size}


def test_a_broken_file_does_not_keep_the_other_models_from_being_served(
    tmp_path: Path, models: dict[str, Path], alone: dict[str, str]
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(60))
    options = Options(**SETTINGS)
    with Shelf.of_files({"tiny": models["tiny"], "broken": broken}, options) as shelf:
        shelf.load_first()
        with serving(shelf, options) as server, httpx.Client(base_url=server.address) as http:
            both = Server(shelf, http)
            response = both.ask("broken")
            assert response.status_code == 500
            assert str(broken) in response.json()["error"]["message"]
            assert both.text("tiny") == alone["tiny"]


def test_the_errors_of_the_first_model_are_the_callers(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(FormatError):
        Shelf.of_files({"broken": broken}, Options(**SETTINGS)).load_first()


def test_a_request_for_a_model_that_can_never_load_fails_without_a_task() -> None:
    card = ModelCard(name="bad", path=Path("bad.gguf"), error=FormatError("It is empty."))
    shelf = Shelf([card], Options(**SETTINGS))

    async def hold() -> None:
        await shelf.hold(shelf.models[0])

    with pytest.raises(RefusalError, match="It is empty") as caught:
        asyncio.run(hold())
    assert caught.value.status == 500


def test_a_model_that_the_caller_loaded_stays() -> None:
    shelved = ShelvedModel(ModelCard(name="given"), Options(**SETTINGS), idle_s=0.0)
    assert not shelved.removable
    assert shelved.idle_left_s == NEVER
