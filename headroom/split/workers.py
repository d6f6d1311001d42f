"""Workers: the processes that run the stages of a model, as the engine's process sees them.

The engine sends each step to all workers at once. Worker 1 looks the tokens up and hands its rows
to worker 2, and so on; the last one sends logits back. So several steps can be under way, each at
another worker. The engine watches all workers. If one dies, sends nothing for `--worker-timeout`
seconds, or computes nothing for as long while a step waits for it, the steps under way end with an
error. Then the engine ends all workers and starts them again, because the caches and connections of
the others are useless without the lost one.
"""

import contextlib
import logging
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed

from headroom import __version__
from headroom.errors import DeviceError, OptionError
from headroom.experts.placement import ExpertPlacement
from headroom.layers.batch import Batch
from headroom.layers.draws import Draw, TokenMask
from headroom.layers.features import FeatureRows, ModelFeatures
from headroom.machine.devices import DeviceSpec, detect_cpu
from headroom.options import Options, child_environment
from headroom.plan.cost_model import exchange_speeds
from headroom.plan.describe import ModelDescription
from headroom.plan.lines import kept_logits_bytes
from headroom.plan.plan import Plan
from headroom.plan.settings import FeatureRequest
from headroom.progress import LoadProgress, ignore_progress
from headroom.split.model import HandedRows
from headroom.split.pipeline import LoadTimes, Pipeline, StageMemory
from headroom.split.placing import expert_layers
from headroom.split.plan_digest import plan_digest
from headroom.split.stage_times import NamedTimes, StageTimes
from headroom.split.wire import Connection, Header, Heartbeat, Message, SilenceError, WireError
from headroom.split.worker_experts import WorkerExchanges, WorkerExperts, WorkerStore
from headroom.split.worker_messages import (
    CACHE_READS,
    LOST,
    LoadOrder,
    LoadReport,
    WorkerLostError,
    cache_message,
    expect,
    step_message,
)
from headroom.units import counted

log = logging.getLogger(__name__)

torch_dist: Any = torch.distributed  # torch declares no types for what is used here

HERE = ("localhost", "127.0.0.1", "::1")
START_S = 180.0  # seconds that a worker of this machine has to start and to connect
REACH_S = 10.0  # seconds for which such a worker tries to connect once it runs
JOIN_S = 600.0  # seconds that workers of other machines have to connect
POLL_S = 0.2  # seconds between looks at what else may have happened while workers are awaited
END_S = 2.0  # seconds that workers have to exit by themselves
END_AFTER_LOSS_S = 0.2  # the same after a loss: the other workers may be waiting for the lost one
MOST_GUESTS = 64  # open connections that have not proved yet that they know the token
# Seconds to wait for the exit of the worker that failed first, which explains the loss better.
BETTER_REASON_S = 1.5
REASON_POLL_S = 0.02
# A part of a layer may take --worker-timeout plus so many seconds for each row of the step. A row
# of one layer of a dense model of 27B takes 0.04 s on a core that computes 20 GFLOP/s.
STALL_ROW_S = 0.05
COMPILE_S = 60.0  # more seconds on a GPU, whose first steps may compile kernels
TOKEN_BYTES = 32
RUN = ("-m", "headroom")  # arguments with which Python runs headroom in a new worker
ASK_AGAIN = "All workers are started again. Ask once more."
WINDOW_S = 600.0  # seconds; only losses this recent count towards --worker-restarts


@dataclass(frozen=True, slots=True)
class HostWorkers:
    """Workers of one machine."""

    host: str
    count: int

    @property
    def is_here(self) -> bool:
        """Whether the engine starts these workers itself."""
        return self.host in HERE


def parse_workers(text: str) -> list[HostWorkers]:
    """Return what `--workers` says: `2`, or `host1:2,host2:1`."""
    found = []
    for part in text.split(","):
        host, _, count = part.strip().rpartition(":")
        if not (re.fullmatch(r"[1-9][0-9]?", count) and re.fullmatch(r"[\w.\-]*", host)):
            raise OptionError(
                f"--workers {text} is not understood.",
                hint="Write --workers 2 for two processes here, or --workers host1:2,host2:1.",
                param="workers",
            )
        found.append(HostWorkers(host or HERE[0], int(count)))
    return found


@dataclass(slots=True, eq=False)
class _Worker:
    """One worker process."""

    number: int  # of its stage, from 0
    host: str
    process: "subprocess.Popen[bytes] | None" = None  # None: the engine did not start it
    connection: Connection | None = None
    heartbeat: Heartbeat | None = None
    reader: threading.Thread | None = None  # reads what the worker says once it loads
    pid: int = 0
    device: DeviceSpec | None = None
    report: LoadReport | None = None
    times: StageTimes = field(default_factory=StageTimes)
    progress: int = 0  # of its last heartbeat: counts the parts of layers that it has computed
    done: int = 0  # number of the last step that it has computed
    # Why the worker is lost; set by the thread that reads its connection.
    error: str = ""  # its own failure, as it told it or as the engine noticed it
    follows: bool = False  # it ended only because a worker next to it had ended
    all_read: bool = False  # its connection has ended and everything it sent was read

    @property
    def name(self) -> str:
        """The worker's name in errors."""
        pid = f" (process {self.pid})" if self.pid else ""
        return f"Worker {self.number + 1} on {self.host}{pid}"


class Workers:
    """All worker processes of one engine."""

    def __init__(self, options: Options) -> None:
        assert options.workers is not None
        self._options = options
        self._hosts = parse_workers(options.workers)
        self._timeout_s = options.worker_timeout
        self._token = options.worker_token or secrets.token_hex(TOKEN_BYTES)
        _check_hosts(options, self._hosts)
        self._listener = _listen(options.worker_address)
        self._workers: list[_Worker] = []
        # Guards the fields below. Threads that read connections change them; the engine's thread
        # waits for that.
        self._changed = threading.Condition()
        self._lost = ""  # which worker is lost, and why
        self._restarting = ""  # why workers are being started again
        self._closing = False
        # Answers that are awaited, oldest first: by kind and number, with the rows they are about.
        self._wanted: dict[tuple[str, int], int] = {}
        self._asked = 0  # questions so far
        self.starts = 0  # how often all workers were started
        self._answers: dict[tuple[str, int], Message] = {}  # those that have come
        # Output rows of layers, by worker and step, of the last steps.
        self._features: OrderedDict[tuple[int, int], torch.Tensor] = OrderedDict()
        self._watched: tuple[object, ...] = ()  # the oldest step and its progress, as last seen
        self._moved_at = 0.0  # time.monotonic() when that last changed
        self._order: tuple[Plan, ModelDescription, ExpertPlacement | None] | None = None
        self._guests = threading.BoundedSemaphore(MOST_GUESTS)
        self.on_loss: Callable[[], None] = lambda: None  # called by a thread that reads
        self.hint: Callable[[], str] = lambda: ""  # what a client can do about a loss

    @property
    def count(self) -> int:
        """The number of workers."""
        return sum(host.count for host in self._hosts)

    @property
    def devices(self) -> list[DeviceSpec]:
        """The workers' devices in the order of the stages; known once the workers have started."""
        return [worker.device for worker in self._workers if worker.device is not None]

    @property
    def times(self) -> list[StageTimes]:
        """What each worker's steps took, since it was started."""
        return [worker.times for worker in self._workers]

    @property
    def lost(self) -> str:
        """Which worker is lost and why, until all workers run again; "" while none is lost."""
        return self._lost or self._restarting

    def start(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Start the workers of this machine, and wait until all have connected."""
        with self._changed:
            self._answers.clear()
            self._wanted.clear()
            self._features.clear()
        self.starts += 1
        self._workers = [
            _Worker(number, host)
            for number, host in enumerate(x.host for x in self._hosts for _ in range(x.count))
        ]
        try:
            for worker in self._workers:
                if worker.host in HERE:
                    worker.process = self._start_process(worker)
            self._accept_all(stop)
        except BaseException:
            self._end_all(again=bool(self._restarting))
            raise
        self._name_devices()

    def load(
        self,
        plan: Plan,
        model: ModelDescription,
        placement: ExpertPlacement | None,
        progress: LoadProgress = ignore_progress,
        stop: Callable[[], bool] = lambda: False,
    ) -> list[LoadReport]:
        """Let every worker load its layers; return what each has loaded."""
        self._order = plan, model, placement
        store, meeting = _open_meeting(self._workers[0].connection)
        digest, group = plan_digest(plan), secrets.token_hex(8)
        done: Counter[int] = Counter()
        totals: Counter[int] = Counter()
        waiting = set(range(self.count))

        def heard(worker: _Worker, header: Header) -> None:
            if header["type"] == "progress":
                done[worker.number], totals[worker.number] = header["done"], header["total"]
            elif header["type"] == "ready":
                worker.report = LoadReport.read(header)
                waiting.discard(worker.number)

        for worker in self._workers:
            order = LoadOrder(
                worker=worker.number,
                model=str(model.checkpoint.path),
                identity=model.checkpoint.identity,
                options=plan.problem.options,
                devices=plan.problem.devices,
                plan_digest=digest,
                placement=placement,
                features=plan.problem.request.features,
                meeting=meeting,
                group=group,
            )
            assert worker.connection is not None
            self._read_in_thread(worker, heard)
            try:
                worker.connection.send(order.message())
            except WireError as error:
                self._lose(worker, error.message)
        with self._changed:
            while waiting:
                self._changed.wait(POLL_S)
                self._check()
                if stop():
                    raise WorkerLostError("The engine is shutting down.")
                progress(sum(done.values()), sum(totals.values()) or 1)
        del store
        with self._changed:
            self._restarting = ""
        log.info("workers: %s loaded all layers", counted(self.count, "worker"))
        return [worker.report for worker in self._workers if worker.report is not None]

    def restart(self, stop: Callable[[], bool]) -> None:
        """End all workers, start new ones, and let them load the same layers."""
        assert self._order is not None
        started = time.perf_counter()
        self._end_all(again=True)
        with self._changed:
            self._lost, self._restarting = "", self._lost or self._restarting
        plan, model, placement = self._order
        try:
            self.start(stop)
            self.load(plan, model, placement, stop=stop)
        except DeviceError as error:
            with self._changed:
                self._restarting = error.message
            raise
        log.warning("workers: started again in %.1f s", time.perf_counter() - started)

    def send(self, header: Header, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Send a message to all workers, in order."""
        self.send_parts(header, [tensors] * self.count)

    def send_parts(self, header: Header, parts: Sequence[Sequence[torch.Tensor]]) -> None:
        """Send a message to all workers, in order, with other tensors to each."""
        with self._changed:
            self._check()
            if self._restarting:  # another thread may ask while workers load
                raise WorkerLostError(self._restarting, hint=self.hint())
            workers = list(self._workers)
        try:
            for worker, tensors in zip(workers, parts, strict=True):
                assert worker.connection is not None
                worker.connection.send(header, tensors)
        except WireError as error:
            self._lose(worker, error.message)
            with self._changed:
                self._check()

    def ask(self, number: int, header: Header, rows: int = 0) -> int:
        """Ask one worker something, about so many rows; return the number of the question.

        Any thread may ask, each about its own types of questions.
        """
        with self._changed:
            self._check()
            if self._restarting:  # another thread may ask while workers load
                raise WorkerLostError(self._restarting, hint=self.hint())
            worker = self._workers[number]
            self._asked += 1
            asked = self._asked
            # Under the same lock: a restart forgets all questions.
            self._wanted[_told_by(header["type"], number), asked] = rows
        assert worker.connection is not None
        try:
            worker.connection.send(header | {"ask": asked})
        except WireError as error:
            self._lose(worker, error.message)
        return asked

    def ask_all(self, header: Header) -> list[Message]:
        """Ask all workers something, and return their answers.

        Each answers when it has computed all steps that were sent before.
        """
        asked = [self.ask(number, header) for number in range(self.count)]
        return [self.answer(header["type"], number, ask) for number, ask in enumerate(asked)]

    def answer(self, kind: str, number: int, asked: int) -> Message:
        """Wait for a worker's answer to a question, and return it."""
        return self.take(_told_by(kind, number), asked)

    def has_answer(self, kind: str, number: int, asked: int) -> bool:
        """Return whether a worker's answer has come; raise an error if it never will."""
        key = _told_by(kind, number), asked
        with self._changed:
            self._check()
            if key not in self._wanted:
                raise WorkerLostError("The workers of this question are gone.", hint=self.hint())
            return key in self._answers

    def expect(self, kind: str, number: int, rows: int) -> None:
        """Keep the answer about so many rows until it is taken; other answers are dropped."""
        with self._changed:
            self._wanted[kind, number] = rows

    def take(self, kind: str, number: int) -> Message:
        """Wait for an answer, and return it."""
        with self._changed:
            while (kind, number) not in self._answers:
                self._check()
                if (kind, number) not in self._wanted:  # workers were started again since
                    raise WorkerLostError("The workers of this step are gone.", hint=self.hint())
                self._changed.wait()
            # Answers are taken in order. Older ones were left because their requests have ended.
            for key in [key for key in self._wanted if key[0] == kind and key[1] < number]:
                del self._wanted[key]
                self._answers.pop(key, None)
            del self._wanted[kind, number]
            return self._answers.pop((kind, number))

    def read_caches(self, do: str, at: int) -> list[torch.Tensor]:
        """Return each worker's bytes of a page or a snapshot; one thread at a time may ask.

        This waits for all steps that were sent.
        """
        assert do in CACHE_READS
        answers = self.ask_all({"type": "bytes", "do": do, "at": at})
        return [tensor for message in answers for tensor in message.tensors]

    def features(self, number: int, step: int) -> torch.Tensor:
        """Wait until a worker has computed a recent step; return what it keeps of its layers."""
        with self._changed:
            while (number, step) not in self._features:
                self._check()
                self._changed.wait()
            return self._features[number, step]

    def close(self) -> None:
        """End all workers; no step follows."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._end_all(again=False)
        self._listener.close()

    def _check(self) -> None:
        """Raise an error if a worker is lost or the engine closes; the caller holds the lock."""
        if self._lost:
            raise WorkerLostError(self._lost, hint=self.hint())
        if self._closing:
            raise WorkerLostError("The engine is shutting down.")

    # Starting

    def _start_process(self, worker: _Worker) -> "subprocess.Popen[bytes]":
        """Start a worker of this machine; its environment tells it the token."""
        changes = {"HEADROOM_WORKER_TOKEN": self._token, "PYTHONUNBUFFERED": "1"}
        if self._options.ram is not None:  # headroom worker has no flag for it
            changes["HEADROOM_RAM"] = self._options.ram
        return subprocess.Popen(
            self._command(worker),
            env=child_environment(changes),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C ends the engine, which ends its workers
        )

    def _command(self, worker: _Worker) -> list[str]:
        """Return the command line of a worker of this machine."""
        host, port = self._listener.getsockname()[:2]
        options, here = self._options, [x for x in self._workers if x.host in HERE]
        place = here.index(worker)
        threads = options.threads or max(1, detect_cpu().cores // len(here))
        devices = (options.device or "cpu").split(",")
        command = [
            *(sys.executable, *RUN, "worker"),
            *("--join", f"{host}:{port}", "--slot", str(worker.number)),
            *("--wait", str(REACH_S), "--worker-timeout", str(self._timeout_s)),
            *("--device", devices[place % len(devices)].strip(), "--threads", str(threads)),
            *("--home", str(options.home_path), "--log-level", options.log_level),
        ]
        if options.device_memory is not None:
            command += ["--device-memory", options.device_memory]
        if options.pin_threads and (cores := _share_of_cores(place, len(here))):
            command += ["--cores", ",".join(map(str, cores))]
        return command

    def _accept_all(self, stop: Callable[[], bool]) -> None:
        """Wait until every worker has connected and proved that it knows the token."""
        remote = [host for host in self._hosts if not host.is_here]
        for host in remote:
            address, port = self._listener.getsockname()[:2]
            log.warning(
                "workers: waiting for %s of %s; run there: headroom worker --join %s:%d",
                host.count,
                host.host,
                address,
                port,
            )
        ends = time.monotonic() + (JOIN_S if remote else START_S)
        self._listener.settimeout(POLL_S)
        while missing := [x for x in self._workers if x.connection is None]:
            for worker in missing:
                status = None if worker.process is None else worker.process.poll()
                if status is not None:
                    raise WorkerLostError(
                        f"{worker.name} ended by {_ended(status)} before it had connected.",
                        hint="Its own messages above say why.",
                    )
            if stop():
                raise WorkerLostError("The engine is shutting down.")
            if time.monotonic() > ends:
                names = ", ".join(worker.name for worker in missing)
                raise WorkerLostError(f"{names} did not connect.")
            try:
                end, _ = self._listener.accept()
            except TimeoutError:
                continue
            connection = Connection(end, self._timeout_s)
            if not self._guests.acquire(blocking=False):
                connection.close()
                continue
            # In a thread, so that a stranger that sends nothing does not keep workers waiting.
            threading.Thread(
                target=self._receive_guest, args=(connection,), name="headroom-guest", daemon=True
            ).start()

    def _receive_guest(self, connection: Connection) -> None:
        """Give the process behind a new connection a place, or close the connection."""
        try:
            self._welcome(connection)
        except Exception as error:  # a stranger may send anything
            log.warning("workers: a connection was refused: %s", error)
            connection.close()
        finally:
            self._guests.release()

    def _welcome(self, connection: Connection) -> None:
        """Give a process that knows the token its place among the workers."""
        connection.deadline = time.monotonic() + self._timeout_s
        connection.prove_as_engine(self._token)
        hello = expect(connection.receive().header, "hello")
        connection.deadline = None
        if hello["version"] != __version__:
            connection.refuse(
                f"The worker has headroom {hello['version']}, the engine {__version__}."
            )
        pid, device = int(hello["pid"]), DeviceSpec(**hello["device"])
        address = connection.peer_address
        hosts = {x.host for x in self._hosts if not x.is_here}
        own = {x for x in hosts if x == hello["host"] or address in _addresses(x)}
        with self._changed:
            if not self._workers:
                raise WireError("No workers are being started now.")
            worker = self._find_place(hello["slot"], own)
            if worker is not None:
                worker.connection, worker.pid, worker.device = connection, pid, device
                worker.heartbeat = Heartbeat(connection)
        if worker is None:
            connection.refuse(f"--workers has no free place for {hello['host']} ({address}).")

    def _find_place(self, slot: int | None, hosts: set[str]) -> _Worker | None:
        """Return the free place of a process that has a slot, or runs on one of the hosts."""
        for worker in self._workers:
            if slot is None:
                fits = worker.process is None and worker.host in hosts
            else:
                fits = worker.process is not None and worker.number == slot
            if fits and worker.connection is None:
                return worker
        return None

    def _name_devices(self) -> None:
        """Name the workers' devices apart, and divide the memory that several of them share."""
        sharing = Counter(
            (worker.host, worker.device.name) for worker in self._workers if worker.device
        )
        for worker in self._workers:
            device = worker.device
            assert device is not None
            count = sharing[worker.host, device.name]
            label = str(worker.number + 1)
            if worker.host not in HERE:
                label = f"{worker.host}.{label}"
            worker.device = replace(
                device,
                name=f"{device.name}#{label}",
                total_bytes=device.total_bytes // count,
                available_bytes=device.available_bytes // count,
                driver_bytes=device.driver_bytes // count,
                card_bytes=device.card_bytes // count,
            )

    # Watching

    def _read_in_thread(self, worker: _Worker, heard: Callable[[_Worker, Header], None]) -> None:
        worker.reader = threading.Thread(
            target=self._read, args=(worker, heard), name="headroom-worker", daemon=True
        )
        worker.reader.start()

    def _read(self, worker: _Worker, heard: Callable[[_Worker, Header], None]) -> None:
        """Read a worker's messages until its connection ends."""
        connection = worker.connection
        assert connection is not None
        try:
            while True:
                message = header, tensors = connection.receive()
                kind = header["type"]
                if kind == "alive":
                    self._watch(worker, int(header["progress"]))
                    continue
                if kind == "error":
                    reason = f"{header['message']} {header['hint']}".strip()
                    worker.error, worker.follows = reason, bool(header["neighbour"])
                    break
                with self._changed:
                    if worker not in self._workers:  # it is being ended
                        continue
                    if kind == "result":
                        worker.times.add_told(header)
                        worker.done = int(header["step"])
                        if header["features"]:
                            self._keep_features(worker, tensors.pop())
                        if worker is self._workers[-1]:
                            self._keep_answer("step", header["step"], message)
                    elif "ask" in header:
                        self._keep_answer(_told_by(kind, worker.number), header["ask"], message)
                    else:
                        heard(worker, header)
                    self._changed.notify_all()
        except SilenceError as error:
            reason = worker.error = error.message
        except WireError as error:
            reason = error.message
        except Exception as error:  # a message lacks a field, for example
            log.exception("workers: cannot read a message of %s", worker.name)
            reason = worker.error = f"its message is malformed: {type(error).__name__}: {error}."
        worker.all_read = True
        self._lose(worker, reason)

    def _keep_answer(self, kind: str, number: int, message: Message) -> None:
        if (kind, number) in self._wanted:
            self._answers[kind, number] = message

    def _keep_features(self, worker: _Worker, rows: torch.Tensor) -> None:
        """Keep what a worker has sent of its layers, for as many steps as can be under way."""
        self._features[worker.number, worker.done] = rows
        while len(self._features) > self.count * (self.count + 2):
            self._features.popitem(last=False)

    def _watch(self, worker: _Worker, progress: int) -> None:
        """Note a worker's progress; lose the worker that the oldest step waits for if it hangs."""
        with self._changed:
            worker.progress, now = progress, time.monotonic()
            found = self._oldest()
            if found is None:
                self._watched = ()
                return
            holder, key, rows = found
            watched = (key, holder.number, holder.progress)
            if watched != self._watched:
                self._watched, self._moved_at = watched, now
                return
            still_s, limit_s = now - self._moved_at, self._timeout_s + rows * STALL_ROW_S
            if holder.device is not None and holder.device.kind != "cpu":
                limit_s += COMPILE_S
            if still_s <= limit_s:
                return
            size = counted(rows, "row")
            holder.error = f"it has computed nothing for {still_s:.0f} s of a step of {size}."
        self._lose(holder, holder.error)

    def _oldest(self) -> tuple[_Worker, tuple[str, int], int] | None:
        """Return the worker that the oldest step under way waits for, the step, and its rows."""
        for (kind, number), rows in self._wanted.items():
            if (kind, number) in self._answers or not self._workers:
                continue
            if kind == "step":
                late = [x for x in self._workers if x.done < number]
            else:
                late = [x for x in self._workers if kind.endswith(_told_by("", x.number))]
            return (late[0] if late else self._workers[-1]), (kind, number), rows
        return None

    def _lose(self, worker: _Worker, reason: str) -> None:
        """Record the first lost worker and wake the engine.

        Later losses are ignored until the restart.
        """
        first, why = self._first_ended(worker, reason)
        with self._changed:
            if not self._may_lose(worker):
                return
            self._lost = f"{first.name} is lost: {why}"
            self._changed.notify_all()
        log.error("workers: %s", self._lost)
        self.on_loss()

    def _may_lose(self, worker: _Worker) -> bool:
        return not self._lost and not self._closing and worker in self._workers

    def _first_ended(self, worker: _Worker, reason: str) -> tuple[_Worker, str]:
        """Return the worker whose end explains the loss, and how it ended.

        When a worker ends, the workers next to it end soon after, and the engine may notice any of
        them first. So this waits a little for a worker that failed by itself. If there is none, it
        returns the worker that was noticed.
        """
        ends = time.monotonic() + BETTER_REASON_S
        while self._may_lose(worker) and time.monotonic() < ends:
            workers = list(self._workers)
            for other in workers:
                if other.error and not other.follows:
                    return other, other.error
            for other in workers:
                if (told := _own_end(other)) is not None:
                    return other, told
            time.sleep(REASON_POLL_S)
        return worker, reason

    def _end_all(self, *, again: bool) -> None:
        """End all worker processes; kill those of this machine that do not exit soon.

        `again` tells workers that were started by hand to join once more.
        """
        with self._changed:
            workers, self._workers = self._workers, []
        for worker in workers:
            if worker.heartbeat is not None:
                worker.heartbeat.end()
            if worker.connection is not None:
                with contextlib.suppress(WireError):
                    worker.connection.send({"type": "end", "again": again})
                worker.connection.end_sending()
        ends = time.monotonic() + (END_S if not self._lost else END_AFTER_LOSS_S)
        for worker in workers:
            if worker.process is not None:
                try:
                    worker.process.wait(max(0.0, ends - time.monotonic()))
                except subprocess.TimeoutExpired:
                    worker.process.kill()
                    worker.process.wait()
        for worker in workers:
            # Closing a socket with unread data resets the connection, and "end" might be lost.
            if worker.reader is not None:
                worker.reader.join(max(0.0, ends - time.monotonic()))
            if worker.connection is not None:
                worker.connection.close()


class WorkerChain:
    """All workers as one stage, which can take several steps at once."""

    drawn: torch.Tensor | None = None  # the engine draws all tokens
    store = None  # the pipeline has the store of all workers
    has_head = True
    guesses = None  # workers verify none
    draft_network = None

    def __init__(
        self,
        workers: Workers,
        device: str,
        routing: WorkerExperts | None = None,  # None: the model has no experts
        *,
        needs_snapshots: bool,
        reports: Sequence[LoadReport] = (),  # of the workers, which say the sizes of their caches
    ) -> None:
        self._workers, self.device, self.routing = workers, device, routing
        self._steps = 0
        self.needs_snapshots = needs_snapshots
        self._page_sizes = [report.page_bytes for report in reports]
        self._snapshot_sizes = [report.snapshot_bytes for report in reports]

    @property
    def caches(self) -> "WorkerChain":
        """What moves the caches of all workers: the chain itself, by messages."""
        return self

    @property
    def cache_files(self) -> "WorkerChain":
        """What tells the bytes of all workers' caches: the chain itself, by messages."""
        return self

    @property
    def page_bytes(self) -> int:
        """The bytes of one page in all workers."""
        return sum(self._page_sizes)

    @property
    def snapshot_bytes(self) -> int:
        """The bytes of one snapshot in all workers."""
        return sum(self._snapshot_sizes)

    def read_page(self, page: int) -> torch.Tensor:
        """Return a page as bytes, as it is after the steps sent so far."""
        return torch.cat(self._workers.read_caches("read_page", page))

    def read_snapshot(self, snapshot: int) -> torch.Tensor:
        """Return a snapshot as bytes."""
        return torch.cat(self._workers.read_caches("read_snapshot", snapshot))

    def write_page(self, page: int, data: torch.Tensor) -> None:
        """Send every worker its part of what `read_page` has returned."""
        self._change(cache_message("write_page", page), torch.split(data, self._page_sizes))

    def write_snapshot(self, snapshot: int, data: torch.Tensor) -> None:
        """Send every worker its part of what `read_snapshot` has returned."""
        parts = torch.split(data, self._snapshot_sizes)
        self._change(cache_message("write_snapshot", snapshot), parts)

    def _change(self, header: Header, parts: Sequence[torch.Tensor] = ()) -> None:
        """Send what changes the workers' caches.

        If a worker is lost, all caches are, and the next step tells it.
        """
        with contextlib.suppress(WorkerLostError):
            tensors = [[part] for part in parts] or [[]] * self._workers.count
            self._workers.send_parts(header, tensors)

    def save_state(self, state_slot: int, snapshot: int, position: int) -> None:
        """Tell every worker to take its part of a snapshot, after the steps sent so far."""
        self._change(cache_message("save_state", state_slot, snapshot, position))

    def load_state(self, snapshot: int, state_slot: int, position: int) -> None:
        """Tell every worker to give a sequence its part of a snapshot."""
        self._change(cache_message("load_state", snapshot, state_slot, position))

    def copy_page(self, source: int, target: int) -> None:
        """Tell every worker to copy a page of keys and values."""
        self._change(cache_message("copy_page", source, target))

    def save_page(self, page: int, slot: int) -> None:
        """Tell every worker to copy a page to a slot of host memory."""
        self._change(cache_message("save_page", page, slot))

    def load_page(self, slot: int, page: int) -> None:
        """Tell every worker to copy a slot of host memory to a page."""
        self._change(cache_message("load_page", slot, page))

    def drop_host_pages(self) -> None:
        """Tell every worker to forget its pages in host memory, and to give this back."""
        self._change(cache_message("drop_host_pages"))

    def drop_snapshots(self) -> None:
        """Tell every worker to forget its snapshots, and to give their memory back."""
        self._change(cache_message("drop_snapshots"))

    def receive(self, received: HandedRows) -> None:
        """Not used: the chain is the only stage."""
        raise AssertionError("workers are the only stage of their pipeline")

    def run(self, batch: Batch, received: HandedRows | None = None) -> HandedRows:
        """Not used: the chain is the only stage."""
        raise AssertionError("workers are the only stage of their pipeline")

    def step(
        self,
        batch: Batch,
        draws: Sequence[Draw | None] = (),
        received: HandedRows | None = None,
    ) -> "ChainResult":
        """Send a step to all workers."""
        self._steps += 1
        drawn = [row for row, draw in enumerate(draws) if draw is not None]
        keep = len(drawn) < len(batch.output_rows)
        header, tensors = step_message(self._steps, batch, drawn, keep)
        self._workers.expect("step", self._steps, len(batch.tokens))
        self._workers.send(header, tensors)
        return ChainResult(self, self._steps, drawn, len(batch.output_rows))

    def features(self, number: int) -> torch.Tensor:
        """Return what a worker keeps of its layers, of the last step that was sent."""
        return self._workers.features(number, self._steps)

    def finish(self, step: int) -> list[torch.Tensor]:
        """Wait until the last worker has computed a step; return the logits that it sent."""
        return self._workers.take("step", step).tensors

    def ask(self, step: int, kind: str, rows: Sequence[int]) -> torch.Tensor:
        """Ask the last worker for some results of a step that it keeps."""
        header = {"type": "rows", "step": step, "kind": kind, "rows": list(rows)}
        last = self._workers.count - 1
        asked = self._workers.ask(last, header, len(rows))
        return self._workers.answer("rows", last, asked).tensors[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Not used: logits of workers are read from a step's result."""
        raise AssertionError("logits of workers are read from a step's result")

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Not used: hidden states of workers are read from a step's result."""
        raise AssertionError("hidden states of workers are read from a step's result")

    def forget_captures(self) -> None:
        """Do nothing: workers keep their captured steps."""

    def close(self) -> None:
        """End all workers."""
        self._workers.close()

    def held_bytes(self) -> int | None:
        """Return None: the memory is that of other processes."""
        return None

    def lost(self) -> str:
        """Return "": the restarter deals with lost workers."""
        return ""

    def repair(self) -> None:
        """Do nothing: a worker in which a step fails is lost."""

    def times(self) -> NamedTimes:
        """Return what the steps of each worker took, by the name of its device."""
        names = [device.name for device in self._workers.devices]
        return list(zip(names, self._workers.times, strict=False))


class ChainResult:
    """The results of a step of workers; they stay valid when later steps begin."""

    lasts = True
    names_tokens = False

    def __init__(self, chain: WorkerChain, step: int, drawn: list[int], outputs: int) -> None:
        self._chain, self._step, self._drawn, self._outputs = chain, step, drawn, outputs
        self.token_rows: Mapping[int, int] = {}
        self._logits: torch.Tensor | None = None  # of the rows that draw tokens
        self._done = False

    def draw_limited(self, masks: Mapping[int, TokenMask | None]) -> None:
        """Do nothing: the engine draws all tokens."""

    def tokens(self) -> list[int | None]:
        """Wait for the step; return None for each output row: the engine draws all tokens."""
        if not self._done:
            found = self._chain.finish(self._step)
            self._logits, self._done = (found[0] if found else None), True
        return [None] * self._outputs

    def logits(self, rows: Sequence[int]) -> torch.Tensor:
        """Return logits of some output rows, float32: sent with the step, or asked for now."""
        self.tokens()
        if not rows:
            return torch.zeros(0, 0)
        known = {row: at for at, row in enumerate(self._drawn)}
        if self._logits is not None and all(row in known for row in rows):
            return self._logits[[known[row] for row in rows]]
        return self._chain.ask(self._step, "logits", rows)

    def normed(self, rows: Sequence[int]) -> torch.Tensor:
        """Return hidden states of some output rows after the final norm, float32."""
        self.tokens()
        return self._chain.ask(self._step, "normed", rows)

    @property
    def hidden(self) -> torch.Tensor:
        """The residual stream of all output rows."""
        self.tokens()
        return self._chain.ask(self._step, "hidden", ())


class ChainRestarter:
    """Starts all workers again after a loss, as often as the options allow."""

    def __init__(self, workers: Workers, options: Options) -> None:
        self._workers = workers
        workers.hint = self._hint
        self._restarts = options.on_worker_loss == "restart"
        self._most = options.worker_restarts
        self._losses: list[float] = []  # time.monotonic() of the losses in the last ten minutes
        self._busy = False  # workers are being started again

    @property
    def on_loss(self) -> Callable[[], None]:
        """What is called when a worker is lost."""
        return self._workers.on_loss

    @on_loss.setter
    def on_loss(self, call: Callable[[], None]) -> None:
        """Call this when a worker is lost."""
        self._workers.on_loss = call

    def trouble(self) -> str:
        """Return which worker is lost, and what a client can do; "" while no worker is lost."""
        lost = self._workers.lost
        return f"{lost} {self._hint()}".strip() if lost else ""

    def _hint(self) -> str:
        """Return what a client can do after a loss; "" if no restart follows."""
        follows = self._busy or (self._restarts and len(self._recent()) < self._most)
        return ASK_AGAIN if follows else ""

    def _recent(self) -> list[float]:
        now = time.monotonic()
        return [lost_at for lost_at in self._losses if now - lost_at < WINDOW_S]

    def restart(self, stop: Callable[[], bool]) -> None:
        """Start all workers again; try once more if a worker is lost before all have loaded.

        Raise an error if the options allow no (further) restart. Return early if `stop` says so.
        """
        tries = 0
        while not stop():
            lost, tries = self._workers.lost, tries + 1
            self._losses = [*self._recent(), time.monotonic()]
            if not self._restarts:
                raise WorkerLostError(lost, hint="Restart the server; see --on-worker-loss.")
            if (losses := max(tries, len(self._losses))) > self._most:
                raise WorkerLostError(
                    f"Workers were lost {counted(losses, 'time')} in {WINDOW_S / 60:g} minutes; "
                    f"--worker-restarts allows {self._most}. {lost}",
                    hint="See the workers' messages above, or raise --worker-restarts.",
                )
            self._busy = True
            try:
                return self._workers.restart(stop)
            except DeviceError as error:
                if not stop():
                    log.error("workers: the restart failed: %s", error)
            finally:
                self._busy = False
        return None


def start_workers(
    options: Options, layers: int, progress: LoadProgress = ignore_progress
) -> Workers | None:
    """Start the worker processes that the options ask for; None if they ask for none.

    `layers` is the model's number of layers; each worker needs at least one. `progress` is called
    several times a second while workers are awaited, and may raise an error to end the wait.
    """
    if options.workers is None:
        return None
    count = sum(host.count for host in parse_workers(options.workers))
    if count > layers:
        raise OptionError(
            f"--workers asks for {count} workers, but the model has {counted(layers, 'layer')}.",
            hint=f"Each worker runs at least one layer: ask for at most {layers}.",
            param="workers",
        )

    def stop() -> bool:
        progress(0, 1)
        return False

    workers = Workers(options)
    with end_on_error(workers):
        workers.start(stop)
    return workers


@contextlib.contextmanager
def end_on_error(workers: Workers | None) -> Iterator[None]:
    """End the workers if the block raises an error."""
    try:
        yield
    except BaseException:
        if workers is not None:
            workers.close()
        raise


def open_worker_pipeline(
    workers: Workers,
    plan: Plan,
    model: ModelDescription,
    options: Options,
    progress: LoadProgress = ignore_progress,
    placement: ExpertPlacement | None = None,
) -> Pipeline:
    """Let the workers load their layers as the plan says; return the pipeline that they run."""
    reports = workers.load(plan, model, placement, progress)
    memory = {
        device.name: StageMemory(report.planned, Counter(report.allocated))
        for device, report in zip(plan.devices, reports, strict=True)
    }
    kept_logits = torch.empty(plan.settings.snapshots, model.config.vocab)
    if plan.settings.snapshots:
        planned = kept_logits_bytes(model.shape, plan.settings)
        memory["engine"] = StageMemory(
            {"snapshots": planned}, Counter({"snapshots": kept_logits.nbytes})
        )
    needs_snapshots = any(layer.kind != "full" for layer in model.shape.layers)
    request = plan.problem.request.features
    experts = max(layer.experts for layer in model.shape.layers)
    routing = WorkerExperts(workers, len(model.shape.layers), experts) if experts else None
    store = None
    if routing is not None and placement is not None:
        store = WorkerStore(routing, [report.cold for report in reports], placement)
    name = plan.devices[0].name
    chain = WorkerChain(workers, name, routing, needs_snapshots=needs_snapshots, reports=reports)
    return Pipeline(
        [chain],
        model.config.vocab,
        memory,
        refuses_trees=model.config.refuses_trees,
        load_times=LoadTimes(
            sum(report.weights_bytes for report in reports),
            max(report.weights_s for report in reports),
            max(report.capture_s for report in reports),
        ),
        # One more than there are workers: while the engine draws the tokens of one step, each
        # worker has another to compute.
        depth=workers.count + 1 if workers.count > 1 else 1,
        pays_to_share=plan.predicted.pays_to_share,
        restarter=ChainRestarter(workers, options),
        store=store,
        experts=None if store is None else _exchanges_of(workers, store, plan, model),
        meter=None if store is None else routing,
        features=None if request is None else _features_of(chain, request, plan, model),
        kept_logits=kept_logits,
    )


def _exchanges_of(
    workers: Workers, store: WorkerStore, plan: Plan, model: ModelDescription
) -> WorkerExchanges | None:
    """Return what exchanges hot and cold experts of workers; None if nothing does."""
    if not store.exchanges or store.is_cached:
        return None
    speeds = exchange_speeds(plan.cold_speeds, plan.settings.cold, store.pinned)
    return WorkerExchanges(workers, store, expert_layers(model.shape, plan), speeds)


def _features_of(
    chain: WorkerChain, request: FeatureRequest, plan: Plan, model: ModelDescription
) -> ModelFeatures:
    """Return the output rows of layers as the workers send them with each step."""
    hidden = model.config.hidden
    return ModelFeatures(
        request,
        [
            FeatureRows(own, request.type, hidden, partial(chain.features, number))
            for number, device in enumerate(plan.devices)
            if (own := request.within(device.layers))
        ],
    )


def _check_hosts(options: Options, hosts: Sequence[HostWorkers]) -> None:
    """Refuse options that workers on these machines cannot obey."""
    here = sum(host.count for host in hosts if host.is_here)
    if any(not host.is_here for host in hosts):
        if options.worker_token is None:
            raise OptionError(
                "Workers of other machines need a token that they share with the engine.",
                hint="Set HEADROOM_WORKER_TOKEN here and there to the same long random text.",
                param="worker_token",
            )
        if options.worker_address in HERE:
            address = options.worker_address
            raise OptionError(
                f"Workers of other machines cannot reach --worker-address {address}.",
                hint="Write the address of this machine that they reach, and a free port, as in "
                "--worker-address 10.0.0.5:7070.",
                param="worker_address",
            )
    named = len(options.device.split(",")) if options.device is not None else 0
    if named > here:
        raise OptionError(
            f"--device names {counted(named, 'device')} for {counted(here, 'worker')} of this "
            "machine.",
            hint="Name one for each worker that --workers starts here; a worker of another machine "
            "gets its own --device.",
            param="device",
        )


def _share_of_cores(place: int, count: int) -> list[int]:
    """Return the cores for one of `count` workers that pin their threads; empty if too few."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    cores = sorted(os.sched_getaffinity(0))
    return cores[place * len(cores) // count : (place + 1) * len(cores) // count]


def _listen(address: str) -> socket.socket:
    """Return a socket that workers connect to, on `HOST` or `HOST:PORT`."""
    host, _, port = address.partition(":")
    try:
        return socket.create_server((host, int(port or 0)))
    except (OSError, ValueError) as error:
        raise OptionError(
            f"Workers cannot connect to --worker-address {address}: {error}.",
            hint="Write an address of this machine and a free port, as in 10.0.0.5:7070.",
            param="worker_address",
        ) from error


def _open_meeting(connection: Connection | None) -> tuple[Any, tuple[str, int]]:
    """Open the store through which workers find each other, on the address that they reached.

    Its port checks no token.
    """
    assert connection is not None
    host = connection.local_address
    listener = socket.create_server((host, 0))
    port = int(listener.getsockname()[1])
    store = torch_dist.TCPStore(
        host,
        port,
        None,
        True,
        timedelta(minutes=10),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, (host, port)


def _told_by(kind: str, number: int) -> str:
    """Return the kind of a worker's answer to a question of some type."""
    return f"{kind} of {number}"


def _addresses(host: str) -> set[str]:
    """Return the addresses of a machine; none if its name is not known."""
    try:
        return {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return set()


def _own_end(worker: _Worker) -> str | None:
    """Return how a worker ended if no other worker's end caused it; None if that is not known."""
    if worker.process is None:
        return "its connection has ended." if worker.all_read and not worker.follows else None
    status = worker.process.poll()
    # A process that exits by itself has usually sent the reason before, so read that first.
    if status is None or status == LOST or (status >= 0 and not worker.all_read):
        return None
    return f"it has ended by {_ended(status)}."


def _ended(status: int) -> str:
    """Return how a process ended, by its exit status."""
    return f"signal {-status}" if status < 0 else f"exit status {status}"
