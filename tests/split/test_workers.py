"""Layers in worker processes give the tokens of one process; lost workers are started again."""

import itertools
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headroom import __version__
from headroom.engine.engine import Engine
from headroom.engine.request import GenerationRequest, SamplingParams, TokenEvent
from headroom.errors import CapacityError, OptionError
from headroom.experts.traces.taps import TraceRecorder
from headroom.families.files import open_checkpoint
from headroom.llm import LLM
from headroom.machine.devices import detect_cpu
from headroom.options import Options
from headroom.plan.describe import describe
from headroom.progress import LoadStep
from headroom.split.choice import make_worker_plan
from headroom.split.wire import Connection, Heartbeat, Message, RefusedError, WireError
from headroom.split.worker import EngineGoneError, Worker, _Steps, connect
from headroom.split.worker_messages import WorkerLostError
from headroom.split.workers import (
    ChainRestarter,
    HostWorkers,
    WorkerChain,
    Workers,
    _told_by,
    _Worker,
    open_worker_pipeline,
    parse_workers,
    start_workers,
)
from tests.families.oracles import PROMPT, variant
from tests.split.test_pipeline import MODELS, PROMPTS, SETTINGS, answers, opened
from tests.tiny import llama_config, random_model, save_gguf

STREAMS = 8


def remote(host: str) -> Options:
    """Options of an engine whose only worker runs on another machine, which is played here."""
    return Options(workers=f"{host}:1", worker_token="t", worker_address="127.0.0.1:0")


LONG = 480  # tokens of an answer: with its prompt they nearly fill the context of 512


def worker_options(**settings: Any) -> Options:
    return Options(**(SETTINGS | {"workers": "2"} | settings))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("2", [HostWorkers("localhost", 2)]),
        ("a.b:2, 10.0.0.1:1", [HostWorkers("a.b", 2), HostWorkers("10.0.0.1", 1)]),
    ],
)
def test_hosts_and_their_workers_are_read(text: str, found: list[HostWorkers]) -> None:
    assert parse_workers(text) == found


@pytest.mark.parametrize("text", ["", "0", "a:b", "a:0", "a:b:2", "2 3", "a;b:2", "-1", "100"])
def test_wrong_hosts_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match="is not understood"):
        parse_workers(text)


def test_workers_of_other_machines_need_a_token() -> None:
    with pytest.raises(OptionError, match="need a token"):
        Workers(Options(workers="elsewhere:1"))


def test_workers_of_other_machines_need_an_address_that_they_reach() -> None:
    with pytest.raises(
        OptionError, match=r"cannot reach --worker-address 127\.0\.0\.1\. .*10\.0\."
    ):
        Workers(Options(workers="elsewhere:1", worker_token="t"))


@pytest.mark.parametrize(
    ("workers", "device", "told"),
    [
        ("1", "cpu,cpu", "names 2 devices for 1 worker of this machine"),
        ("elsewhere:2", "cuda:0", "names 1 device for 0 workers of this machine"),
    ],
)
def test_devices_without_a_worker_are_refused(workers: str, device: str, told: str) -> None:
    given = {"worker_token": "t", "worker_address": "127.0.0.1:0"}
    with pytest.raises(OptionError, match=told):
        Workers(Options(workers=workers, device=device, **given))  # type: ignore[arg-type]


def test_an_address_that_is_not_here_is_refused() -> None:
    with pytest.raises(OptionError, match=r"cannot connect to --worker-address 203\.0\.113\.9"):
        Workers(Options(workers="1", worker_address="203.0.113.9"))


# Between them, two models have layers of all kinds, experts and a shared cache.
USUAL = ("qwen35moe", "gemma4-e4b")


@pytest.mark.parametrize(
    "name",
    [*USUAL, *(pytest.param(x, marks=pytest.mark.slow) for x in MODELS if x not in USUAL)],
)
def test_two_processes_give_the_tokens_of_one(tmp_path: Path, name: str) -> None:
    checkpoint = open_checkpoint(variant(name).save_gguf(tmp_path / "m.gguf"))
    whole = answers(*opened(checkpoint), PROMPTS, together=False)
    options, model = worker_options(), describe(checkpoint)
    workers = Workers(options)
    workers.start()
    plan = make_worker_plan(model.shape, workers.devices, options)
    assert [device.name for device in plan.devices] == ["cpu#1", "cpu#2"]
    pipeline = open_worker_pipeline(workers, plan, model, options)
    for memory in pipeline.memory():  # each worker has allocated what was planned
        assert memory.used_bytes == memory.planned_bytes
    assert pipeline.depth == 3
    first, last = workers.times
    assert answers(plan, pipeline, PROMPTS, together=True) == whole
    assert first.steps > 0
    assert last.busy_s > 0
    assert first.handover_bytes > 0
    assert last.handover_bytes == 0


class Asked:
    """A request under way, and what it has got."""

    def __init__(self, engine: Engine, name: str, tokens: int) -> None:
        self._events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        self._tokens: list[int] = []
        self._wanted = tokens
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=tokens)
        engine.submit(
            GenerationRequest(
                id=name, prompt=tuple(PROMPT[:5]), params=params, stop_ids=frozenset()
            ),
            self._events.put,
        )

    def next(self, timeout_s: float = 60) -> TokenEvent:
        """Wait for the next event, and return it."""
        event = self._events.get(timeout=timeout_s)
        if event.token is not None:
            self._tokens.append(event.token)
        return event

    def end(self, timeout_s: float = 60) -> tuple[TokenEvent, list[int]]:
        """Return the last event, and all tokens; an answer without an error is a full one."""
        while (event := self.next(timeout_s)).finish_reason is None:
            pass
        if event.finish_reason != "error":
            assert event.finish_reason == "length"
            assert len(self._tokens) == self._wanted
        return event, self._tokens


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = random_model(llama_config(num_hidden_layers=4))
    return save_gguf(model, tmp_path_factory.mktemp("workers") / "m.gguf")


def settings(**changed: Any) -> dict[str, Any]:
    given = {"context": 512, "parallel": STREAMS, "threads": 1, "workers": "2"}
    return {**given, "dtype": "f32", "kv_type": "f32", **changed}


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(str(path), **settings(worker_restarts=100)) as made:
        yield made


def pids(llm: LLM) -> list[int]:
    (chain,) = llm.engine._pipeline._stages
    assert isinstance(chain, WorkerChain)
    return [worker.pid for worker in chain._workers._workers]


def stream_all(llm: LLM, name: str) -> list[Asked]:
    """Ask for long answers, and wait until each has begun; none ends within the next moments."""
    asked = [Asked(llm.engine, f"{name} {i} {time.monotonic()}", LONG) for i in range(STREAMS)]
    for one in asked:
        assert one.next().finish_reason is None
    return asked


def lose_one(llm: LLM, number: int, how: signal.Signals, wait_s: float = 0.0) -> list[TokenEvent]:
    """Lose a worker while eight answers stream; return the answers' last events."""
    asked = stream_all(llm, f"{how} {number}")
    time.sleep(wait_s)
    os.kill(pids(llm)[number], how)
    return [one.end()[0] for one in asked]


def test_running_requests_get_an_error_and_the_next_one_works(llm: LLM) -> None:
    before = Asked(llm.engine, "before", 30).end()[1]
    for number, how in ((0, signal.SIGKILL), (1, signal.SIGKILL)):
        lost = pids(llm)[number]
        for event in lose_one(llm, number, how):
            assert event.finish_reason == "error"
            assert f"Worker {number + 1} on localhost (process {lost}) is lost" in event.error
            assert "it has ended by signal 9" in event.error
        assert Asked(llm.engine, f"after {number}", 30).end()[1] == before
        assert lost not in pids(llm)
        assert llm.engine.trouble == ""


def test_an_answer_reports_what_each_worker_took(llm: LLM) -> None:
    timings = Asked(llm.engine, "timed", 30).end()[0].timings
    assert timings is not None
    assert timings.stages is not None
    first, last = timings.stages
    steps = int(str(first["steps"]))
    # What the first worker tells of the last steps may come after the answer's end.
    assert 20 <= steps <= 30
    rows = 4 + steps  # the first step has the five rows of the prompt
    assert first["handover_bytes"] == rows * llama_config().hidden_size * 4
    assert last["handover_bytes"] == 0
    assert float(str(last["busy_s"])) > 0


def test_a_worker_that_is_lost_while_nothing_runs_is_started_again_at_once(llm: LLM) -> None:
    lost = pids(llm)[1]
    os.kill(lost, signal.SIGKILL)
    ends = time.monotonic() + 60
    while not llm.engine.trouble and lost in pids(llm):
        assert time.monotonic() < ends
        time.sleep(0.01)
    while llm.engine.trouble or len(pids(llm)) < 2:
        assert time.monotonic() < ends
        time.sleep(0.05)
    assert Asked(llm.engine, "later", 5).end()[0].finish_reason == "length"


def test_requests_that_wait_are_answered_after_the_restart(llm: LLM) -> None:
    running = stream_all(llm, "run")
    waiting = Asked(llm.engine, "wait", 10)
    os.kill(pids(llm)[0], signal.SIGKILL)
    assert {one.end()[0].finish_reason for one in running} == {"error"}
    assert waiting.end()[0].finish_reason == "length"


def test_a_stranger_at_the_door_changes_nothing(llm: LLM) -> None:
    (chain,) = llm.engine._pipeline._stages
    assert isinstance(chain, WorkerChain)
    address = chain._workers._listener.getsockname()
    with socket.create_connection(address) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert Asked(llm.engine, "polite", 5).end()[0].finish_reason == "length"


def test_vectors_prompts_and_formats_come_from_workers_as_from_one_process(
    llm: LLM, path: Path
) -> None:
    params = SamplingParams(
        temperature=0.8, seed=3, max_tokens=12, prompt_logprobs=True, logprobs=2
    )
    with LLM(str(path), **settings(workers=None)) as alone:
        for one, other in zip(
            llm.generate(["hello there", "a"], params),
            alone.generate(["hello there", "a"], params),
            strict=True,
        ):
            assert one.token_ids == other.token_ids
            assert one.logprobs == other.logprobs
            assert one.prompt_logprobs == other.prompt_logprobs
        vectors = zip(llm.embed(["hello"]), alone.embed(["hello"]), strict=True)
        assert all(np.array_equal(one, other) for one, other in vectors)


def test_if_the_options_say_so_a_lost_worker_ends_the_engine(path: Path) -> None:
    with LLM(str(path), **settings(on_worker_loss="stop", worker_restarts=0)) as llm:
        events = lose_one(llm, 0, signal.SIGKILL)
        assert {event.finish_reason for event in events} == {"error"}
        llm.engine._thread.join(60)
        assert not llm.engine.alive
        with pytest.raises(CapacityError, match="The engine stopped after an error: Worker 1"):
            Asked(llm.engine, "late", 3)


def test_a_model_that_is_another_one_there_is_refused(path: Path, tmp_path: Path) -> None:
    other = save_gguf(random_model(llama_config(num_hidden_layers=3)), tmp_path / "m.gguf")
    options = Options(
        **settings(workers="elsewhere:1", worker_token="t", worker_address="127.0.0.1:0")
    )
    workers = Workers(options)
    host, port = workers._listener.getsockname()
    command = [sys.executable, "-m", "headroom", "worker", str(other), "--join", f"{host}:{port}"]
    environment = os.environ | {"HEADROOM_WORKER_TOKEN": "t", "HEADROOM_THREADS": "1"}
    workers._hosts = [HostWorkers(socket.gethostname(), 1)]
    process = subprocess.Popen(command, env=environment)
    try:
        workers.start()
        model = describe(open_checkpoint(path))
        plan = make_worker_plan(model.shape, workers.devices, options)
        with pytest.raises(WorkerLostError, match="differs from the engine's model file"):
            workers.load(plan, model, None)
    finally:
        process.kill()
        process.wait()
        workers.close()


@pytest.mark.slow
def test_twenty_losses_at_random_moments_leave_nothing_behind(llm: LLM) -> None:
    before = Asked(llm.engine, "first", 30).end()[1]
    draw = random.Random(7)
    sizes, files = [], []
    for number in range(20):
        how = signal.SIGSTOP if number % 5 == 4 else signal.SIGKILL
        asked = stream_all(llm, f"loss {number}")
        time.sleep(draw.uniform(0, 1.5))
        os.kill(pids(llm)[draw.randrange(2)], how)
        lost_at = time.monotonic()
        for one in asked:
            one.end(10)
        assert time.monotonic() - lost_at < 10
        assert Asked(llm.engine, f"next {number}", 30).end()[1] == before
        sizes.append(int(Path("/proc/self/statm").read_text().split()[1]))  # pages in memory
        files.append(len(list(Path("/proc/self/fd").iterdir())))
    assert max(sizes[10:]) < sizes[9] * 1.05
    assert max(files[10:]) <= max(files[:10])
    assert threading.active_count() < 30


def process_that_ends(after: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", f"import os, signal, time; {after}"])


@pytest.mark.parametrize(
    ("others_end", "named"),
    [
        ("time.sleep(0.3); os.kill(os.getpid(), 9)", "Worker 1 on localhost is lost: it has"),
        ("os._exit(70)", "Worker 2 on localhost is lost: The connection has ended."),
    ],
)
def test_the_worker_that_ended_first_is_named(others_end: str, named: str) -> None:
    workers = Workers(Options(workers="2"))
    first = _Worker(0, "localhost", process_that_ends(others_end))
    second = _Worker(1, "localhost", process_that_ends("os._exit(70)"), follows=True)
    workers._workers = [first, second]
    assert second.process is not None
    second.process.wait()
    workers._lose(second, "The connection has ended.")
    assert workers.lost.startswith(named)
    workers.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def start_by_hand(port: int, token: str = "t", *more: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "headroom", "worker", "--join", f"127.0.0.1:{port}"]
    environment = os.environ | {"HEADROOM_WORKER_TOKEN": token, "HEADROOM_THREADS": "1"}
    return subprocess.Popen([*command, *more], env=environment, stderr=subprocess.PIPE)


def test_workers_that_were_started_by_hand_join_again_after_a_loss(path: Path) -> None:
    port = free_port()
    started = [start_by_hand(port) for _ in range(2)]
    given = settings(
        workers=f"{socket.gethostname()}:2", worker_address=f"127.0.0.1:{port}", worker_token="t"
    )
    with LLM(str(path), **given) as llm:
        before = Asked(llm.engine, "before", 30).end()[1]
        asked = stream_all(llm, "by hand")
        lost = next(one for one in started if one.pid == pids(llm)[0])
        lost.kill()
        assert {one.end()[0].finish_reason for one in asked} == {"error"}
        lost.communicate()
        started[started.index(lost)] = start_by_hand(port)  # the other one joins by itself
        assert Asked(llm.engine, "after", 30).end()[1] == before
    for one in started:  # the end of the engine is final
        assert one.communicate(timeout=60)[1] is not None
        assert one.returncode == 0


def test_a_worker_with_another_token_ends_and_says_so() -> None:
    workers = Workers(remote(socket.gethostname()))
    port = workers._listener.getsockname()[1]
    stranger = start_by_hand(port, "another")
    with ThreadPoolExecutor() as pool:
        stopped = threading.Event()
        starting = pool.submit(workers.start, stopped.is_set)
        told = stranger.communicate(timeout=60)[1].decode()
        stopped.set()
        with pytest.raises(WorkerLostError, match="shutting down"):
            starting.result(timeout=10)
    workers.close()
    assert stranger.returncode == 1
    assert "has another token than this worker" in told


@pytest.mark.parametrize(
    ("hello", "told"),
    [
        ({"version": "0.0"}, "The worker has headroom 0.0, the engine "),
        ({"host": "elsewhere"}, "--workers has no free place for elsewhere"),
    ],
)
def test_a_worker_that_is_refused_learns_why(hello: dict[str, str], told: str) -> None:
    workers = Workers(remote("known"))
    workers._workers = [_Worker(0, "known")]
    device = asdict(detect_cpu())
    own = {"type": "hello", "version": __version__, "slot": None, "host": "known", "pid": 1}
    with ThreadPoolExecutor() as pool:
        address = workers._listener.getsockname()[:2]
        joined = pool.submit(connect, address, "t", 5.0, 5.0)
        here = Connection(workers._listener.accept()[0], 5.0)
        welcome = pool.submit(workers._welcome, here)
        joined.result(timeout=10).send(own | {"device": device} | hello)
        with pytest.raises(RefusedError, match=told):
            welcome.result(timeout=10)
        worker = Worker(Options(), "t")
        pool.submit(worker._receive, joined.result())
        with pytest.raises(RefusedError, match=told):
            worker._serve(joined.result())
        for connection in (here, joined.result()):
            connection.close()
    workers.close()


def test_strangers_that_say_nothing_do_not_keep_workers_waiting() -> None:
    # Each stranger could keep the engine for longer than the test waits.
    workers = Workers(replace(remote("known"), worker_timeout=600.0))
    address = workers._listener.getsockname()[:2]
    with ExitStack() as strangers, ThreadPoolExecutor() as pool:
        for _ in range(5):
            strangers.enter_context(socket.create_connection(address))
        starting = pool.submit(workers.start)
        there = connect(address, "t", 5.0, 5.0)
        hello = {"type": "hello", "version": __version__, "slot": None, "host": "known", "pid": 1}
        there.send(hello | {"device": asdict(detect_cpu())})
        starting.result(timeout=60)
        there.close()
    workers.close()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> "list[subprocess.Popen[bytes]]":
    """The worker processes that the test has started."""
    processes: list[subprocess.Popen[bytes]] = []
    start = Workers._start_process

    def note(workers: Workers, worker: _Worker) -> "subprocess.Popen[bytes]":
        processes.append(start(workers, worker))
        return processes[-1]

    monkeypatch.setattr(Workers, "_start_process", note)
    return processes


def test_an_error_after_the_start_of_workers_ends_them(
    path: Path, started: "list[subprocess.Popen[bytes]]"
) -> None:
    with pytest.raises(OptionError, match="is more than the 512 tokens"):
        LLM(str(path), **settings(context=1 << 30))
    assert len(started) == 2
    assert all(process.poll() is not None for process in started)


def test_more_workers_than_layers_are_refused_before_any_is_started(
    path: Path, started: "list[subprocess.Popen[bytes]]"
) -> None:
    with pytest.raises(OptionError, match="asks for 5 workers, but the model has 4 layers"):
        LLM(str(path), **settings(workers="5"))
    assert started == []


def test_workers_refuse_to_record_the_picks_of_routers(
    path: Path, started: "list[subprocess.Popen[bytes]]"
) -> None:
    with pytest.raises(OptionError, match="do not record or replace the picks of routers"):
        LLM(str(path), tap=TraceRecorder(), **settings())
    assert started == []


def test_waiting_for_workers_of_other_machines_ends_when_the_load_does() -> None:
    calls = itertools.count()

    def progress(done: int, total: int, step: LoadStep = "loading") -> None:
        if next(calls) == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        start_workers(remote("elsewhere"), 4, progress)


def test_a_worker_of_this_machine_gets_the_options_that_are_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {2, 3, 5, 7}, raising=False)
    given = {"device": "cuda:0,cuda:1", "device_memory": "2GiB", "home": str(tmp_path)}
    workers = Workers(Options(workers="2", pin_threads=True, threads=2, **given))  # type: ignore[arg-type]
    workers._workers = [_Worker(number, "localhost") for number in range(2)]
    line = " ".join(workers._command(workers._workers[1]))
    assert "--device cuda:1 --threads 2" in line
    assert f"--home {tmp_path}" in line
    assert "--device-memory 2GiB" in line
    assert "--cores 5,7" in line
    workers.close()


def test_a_worker_keeps_its_compiled_kernels_in_its_home_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[Path] = []
    monkeypatch.setattr("headroom.split.worker.CODE.open", opened.append)
    with pytest.raises(EngineGoneError, match="No engine takes workers at 127"):
        Worker(Options(home=str(tmp_path)), "t").run(("127.0.0.1", free_port()), 0.0, 2.0)
    assert opened == [tmp_path]


class Restarts:
    """Workers whose restarts fail a number of times."""

    def __init__(self, fails: int) -> None:
        self.lost, self.fails, self.tries = "Worker 1 is lost: gone.", fails, 0

    def restart(self, stop: Callable[[], bool]) -> None:
        self.tries += 1
        if self.tries <= self.fails:
            self.lost = f"Worker 2 is lost: try {self.tries}."
            raise WorkerLostError(self.lost)


def test_a_restart_that_fails_is_tried_again_until_too_many_were_lost() -> None:
    workers: Any = Restarts(fails=2)
    ChainRestarter(workers, Options(worker_restarts=3)).restart(lambda: False)
    assert workers.tries == 3
    workers = Restarts(fails=2)
    told = r"lost 3 times in 10 minutes; --worker-restarts allows 2. Worker 2 is lost: try 2."
    with pytest.raises(WorkerLostError, match=told):
        ChainRestarter(workers, Options(worker_restarts=2)).restart(lambda: False)
    assert workers.tries == 2


def test_a_restart_ends_without_an_error_when_the_engine_closes() -> None:
    workers: Any = Restarts(fails=1)
    ChainRestarter(workers, Options()).restart(lambda: workers.tries == 1)
    assert workers.tries == 1


def test_the_results_of_all_steps_under_way_are_kept() -> None:
    played: Any = SimpleNamespace(stage=None, features=None, is_last=True)
    steps = _Steps(played, played, played, 9, played)
    for step in range(20):
        steps._keep(step, SimpleNamespace(hidden=torch.ones(1)))  # type: ignore[arg-type]
    assert set(range(10, 20)) <= set(steps._kept)  # one more than there are workers


def test_a_malformed_message_loses_its_worker() -> None:
    workers = Workers(Options(workers="1"))
    with one_worker(workers) as there:
        there.send({"type": "result"})
        workers.expect("step", 1, rows=2)
        with pytest.raises(WorkerLostError, match="its message is malformed: KeyError"):
            workers.take("step", 1)


def test_an_error_before_any_layer_is_loaded_promises_no_restart() -> None:
    workers = Workers(Options(workers="1"))
    workers._lost = "Worker 1 is lost: gone."
    with pytest.raises(WorkerLostError) as raised:
        workers.send({"type": "step"})
    assert str(raised.value) == "Worker 1 is lost: gone."
    workers.close()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "Worker 1 is lost: gone. All workers are started again. Ask once more."),
        ({"worker_restarts": 0}, "Worker 1 is lost: gone."),
        ({"on_worker_loss": "stop"}, "Worker 1 is lost: gone."),
    ],
)
def test_clients_are_told_to_ask_again_only_if_a_restart_follows(
    given: dict[str, Any], told: str
) -> None:
    workers = Workers(Options(workers="1"))
    restarter = ChainRestarter(workers, Options(**given))
    assert restarter.trouble() == ""
    workers._lost = "Worker 1 is lost: gone."
    assert restarter.trouble() == told
    with pytest.raises(WorkerLostError) as raised:
        workers.send({"type": "step"})
    assert str(raised.value) == told
    workers.close()


@contextmanager
def one_worker(workers: Workers) -> Iterator[Connection]:
    """Give an engine a worker that the test plays, over the connection that is returned."""
    there = Connection(socket.create_connection(workers._listener.getsockname()[:2]), 5.0)
    here = Connection(workers._listener.accept()[0], 5.0)
    here._proved = True
    workers._workers = [_Worker(0, "localhost", connection=here)]
    workers._read_in_thread(workers._workers[0], lambda worker, header: None)
    yield there
    there.close()
    workers.close()


@pytest.mark.parametrize("moves", [False, True])
def test_a_worker_that_beats_but_computes_nothing_is_lost(
    monkeypatch: pytest.MonkeyPatch, moves: bool
) -> None:
    monkeypatch.setattr("headroom.split.wire.BEAT_S", 0.05)
    workers = Workers(Options(workers="1"))
    workers._timeout_s = 0.5
    counter = itertools.count()
    with one_worker(workers) as there:
        beat = Heartbeat(there, lambda: next(counter) if moves else 7)
        time.sleep(0.7)  # without a step nothing is expected
        assert workers.lost == ""
        workers.expect("step", 1, rows=2)
        if moves:
            time.sleep(1)
            assert workers.lost == ""
        else:
            with pytest.raises(
                WorkerLostError, match=r"computed nothing for \d+ s of a step of 2 "
            ):
                workers.take("step", 1)
        beat.end()


def test_closing_wakes_who_waits_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headroom.split.workers.END_S", 0.1)
    workers = Workers(Options(workers="1"))
    workers.expect("step", 1, rows=2)
    with ThreadPoolExecutor() as pool, one_worker(workers):
        waiting = pool.submit(workers.take, "step", 1)
        time.sleep(0.05)
        workers.close()
        with pytest.raises(WorkerLostError, match="shutting down"):
            waiting.result(timeout=10)


def test_the_oldest_step_waits_for_the_worker_after_the_last_that_computed_it() -> None:
    workers = Workers(Options(workers="3"))
    first, second, third = workers._workers = [_Worker(n, "localhost") for n in range(3)]
    assert workers._oldest() is None
    for step in (1, 2, 3):
        workers.expect("step", step, rows=step)
    first.done, second.done, third.done = 3, 1, 1
    workers._answers["step", 1] = Message({}, [])
    assert workers._oldest() == (second, ("step", 2), 2)
    second.done = 2
    assert workers._oldest() == (third, ("step", 2), 2)
    workers._wanted.clear()
    workers.expect(_told_by("experts", 1), 1, 0)
    assert workers._oldest() == (second, (_told_by("experts", 1), 1), 0)
    workers.close()


STUCK = """
import time
from headroom.split import worker
worker._Steps._step = lambda *arguments: time.sleep(1000)
from headroom.cli.main import main
main()
"""


def test_a_worker_whose_step_hangs_ends_the_request_with_an_error_and_lets_the_engine_close(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headroom.split.workers.RUN", ("-c", STUCK))
    llm = LLM(str(path), **settings(worker_timeout=5.0))
    waits, take = threading.Event(), Workers.take

    def note(workers: Workers, kind: str, number: int) -> Message:
        waits.set()
        return take(workers, kind, number)

    monkeypatch.setattr(Workers, "take", note)
    stuck = Asked(llm.engine, "stuck", 5)
    assert waits.wait(60)
    llm.close()
    event, _ = stuck.end()
    assert "Worker 1 on localhost" in event.error
    assert "it has computed nothing for" in event.error


def test_a_connection_that_proves_nothing_is_closed() -> None:
    workers = Workers(Options(workers="1"))
    with socket.create_connection(workers._listener.getsockname()[:2]) as there:
        here, _ = workers._listener.accept()
        there.close()
        with pytest.raises(WireError):
            workers._welcome(Connection(here, 1.0))
    workers.close()


def test_what_a_worker_says_while_it_is_ended_is_dropped() -> None:
    workers = Workers(Options(workers="1"))
    there = Connection(socket.create_connection(workers._listener.getsockname()[:2]), 5.0)
    here = Connection(workers._listener.accept()[0], 5.0)
    here._proved = True
    ended = _Worker(0, "localhost", connection=here)
    workers.expect(_told_by("rows", 0), 1, 1)
    there.send({"type": "rows", "ask": 1}, [torch.ones(1)])
    there.send({"type": "result", "step": 1})
    there.end_sending()
    workers._read(ended, lambda worker, header: None)
    assert workers._answers == {}
    for connection in (there, here):
        connection.close()
    workers.close()
