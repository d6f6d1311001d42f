"""Worker: a process that runs one stage of a model for an engine in another process.

The worker proves that it knows the token, describes its device, loads the layers that the engine
names, and then computes steps in the order in which they come. Rows go from worker to worker by
torch.distributed; everything else goes over the connection to the engine.
"""

import logging
import os
import queue
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import torch

from headroom import __version__
from headroom.errors import FormatError, HeadroomError, ModelError
from headroom.families.files import find_weights, open_checkpoint
from headroom.kernels.cuda.compile import CODE
from headroom.layers.step_timing import recording
from headroom.machine.devices import DeviceSpec
from headroom.machine.targets import plan_devices
from headroom.options import Options
from headroom.plan.describe import ModelDescription, describe
from headroom.plan.plan import Plan, make_plan
from headroom.split.launch import OpenedStage, open_stage
from headroom.split.memory_check import limit_memory
from headroom.split.neighbours import NeighbourLostError, Neighbours
from headroom.split.plan_digest import plan_digest
from headroom.split.stage import StepResult
from headroom.split.stage_times import StageTimes
from headroom.split.wire import (
    Connection,
    Header,
    Heartbeat,
    Message,
    RefusedError,
    WireError,
)
from headroom.split.worker_experts import StageExperts
from headroom.split.worker_messages import (
    CACHE_MOVES,
    CACHE_READS,
    CACHE_WRITES,
    LOST,
    LoadOrder,
    LoadReport,
    expect,
    read_batch,
)

log = logging.getLogger(__name__)

RETRY_S = 0.5  # seconds between attempts to reach an engine
LEAVE_S = 1.0  # seconds that the main thread has to end after the engine's last message


class EngineGoneError(HeadroomError):
    """No engine takes workers at the address."""


class _Progress:
    """Counts the steps and the parts of layers that have begun or ended."""

    def __init__(self) -> None:
        self.count = 0

    def begin_step(self) -> None:
        """Count a step."""
        self.count += 1

    def begin(self, part: str) -> None:
        """Count the beginning of a layer's part."""
        self.count += 1

    def end(self, part: str) -> None:
        """Count the end of a layer's part."""
        self.count += 1


class Worker:
    """Runs one stage for the engine at an address."""

    def __init__(
        self,
        options: Options,
        token: str,
        slot: int | None = None,  # the worker's number; None: the engine did not start it
        model: str | None = None,  # this machine's copy; None: at the engine's path
        # Replaces this process by a new one that joins the engine; None: the engine starts one.
        join_again: Callable[[], None] | None = None,
    ) -> None:
        self._options, self._token, self._slot, self._model = options, token, slot, model
        self._join_again = join_again
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._computing = False
        self._progress = _Progress()
        self._joins_again = False  # the engine starts its workers again, or may be started again
        self._leaving = False  # this worker itself closes the connection

    def run(self, address: tuple[str, int], wait_s: float, timeout_s: float) -> None:
        """Serve the engine at an address until it ends this worker."""
        CODE.open(self._options.home_path)
        device = own_device(self._options)
        connection = connect(address, self._token, wait_s, timeout_s)
        heartbeat = Heartbeat(connection, lambda: self._progress.count)
        connection.send(self._hello(device))
        threading.Thread(
            target=self._receive, args=(connection,), name="headroom-receive", daemon=True
        ).start()
        try:
            self._serve(connection)
        except NeighbourLostError as error:
            _tell(connection, error, neighbour=True)
            raise
        except Exception as error:
            _tell(connection, error)
            raise
        finally:
            self._leaving = True
            heartbeat.end()
            connection.close()
        if self._joins_again:
            self._leave(0)

    def _hello(self, device: DeviceSpec) -> Header:
        return {
            "type": "hello",
            "version": __version__,
            "slot": self._slot,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "device": asdict(device),
        }

    def _receive(self, connection: Connection) -> None:
        """Put messages into the inbox; end the process if the engine ends it or is gone.

        The main thread cannot do that: it may wait for a neighbour that will never answer.
        """
        try:
            while True:
                message = connection.receive()
                kind = message.header["type"]
                if kind == "end":
                    self._joins_again = bool(message.header["again"])
                    self._inbox.put(None)
                    if not self._computing:
                        time.sleep(LEAVE_S)  # the main thread is about to end by itself
                    self._leave(0)
                if kind != "alive":
                    self._inbox.put(message)
                if kind == "refused":
                    return
        except Exception as error:
            if not self._leaving:
                log.error("worker: the engine is gone: %s", error)
                self._joins_again = True  # somebody may start it again
                self._leave(LOST)

    def _leave(self, status: int) -> None:
        """End this process, from any thread; a worker may be replaced by one that joins again."""
        if self._joins_again and self._join_again is not None:
            self._join_again()
        os._exit(status)

    def _serve(self, connection: Connection) -> None:
        message = self._inbox.get()
        if message is None:
            return
        if message.header["type"] == "refused":
            raise RefusedError(f"The engine refused this worker: {message.header['reason']}")
        order = LoadOrder.read(expect(message.header, "load"))
        self._computing = True
        stage, experts, neighbours = self._load(order, connection)
        self._computing = False
        steps = _Steps(stage, experts, neighbours, order.workers, connection)
        while (message := self._inbox.get()) is not None:
            self._computing = True
            with torch.inference_mode(), recording(self._progress):
                steps.take(message)
            self._progress.begin_step()
            self._computing = False
        stage.stage.close()

    def _load(
        self, order: LoadOrder, connection: Connection
    ) -> tuple[OpenedStage, StageExperts, Neighbours]:
        told = [0.0]

        def progress(
            done: int, total: int, step: Literal["loading", "capturing"] = "loading"
        ) -> None:
            now = time.monotonic()
            if now - told[0] > 0.1 or done == total:
                told[0] = now
                header = {"type": "progress", "done": done, "total": total, "what": step}
                connection.send(header)

        model = self._describe(order)
        plan = planned(model, order)
        limit_memory(plan, order.options.device_memory, only=plan.devices[order.worker])
        stage = open_stage(plan, model, order.worker, order.placement, progress)
        experts = StageExperts(stage.stage.routing, stage.cold, stage.exchanges)
        neighbours = Neighbours.meet(
            order, connection.local_address, plan, model.config, order.worker
        )
        stage.memory.allocated["staging"] += neighbours.nbytes
        connection.send(
            LoadReport(
                planned=dict(stage.memory.planned),
                allocated=dict(stage.memory.allocated),
                weights_bytes=stage.times.weights_bytes,
                weights_s=stage.times.weights_s,
                capture_s=stage.times.capture_s,
                page_bytes=stage.stage.cache_files.page_bytes,
                snapshot_bytes=stage.stage.cache_files.snapshot_bytes,
                cold=experts.report(),
            ).message()
        )
        return stage, experts, neighbours

    def _describe(self, order: LoadOrder) -> ModelDescription:
        name = self._model or order.model
        try:
            path = find_weights(name, self._options.home_path)
        except FormatError as error:
            raise ModelError(
                f"{socket.gethostname()} has no copy of the model at {name}.",
                hint="Start the worker with the path of its copy: headroom worker MODEL --join ...",
            ) from error
        checkpoint = open_checkpoint(Path(path))
        if checkpoint.identity != order.identity:
            raise ModelError(
                f"{path} on {socket.gethostname()} differs from the engine's model file.",
                hint="Copy the engine's file to this machine.",
            )
        return describe(checkpoint)


class _Steps:
    """Computes the steps of a worker's stage."""

    def __init__(
        self,
        opened: OpenedStage,
        experts: StageExperts,
        neighbours: Neighbours,
        workers: int,
        connection: Connection,
    ) -> None:
        self._stage, self._neighbours = opened.stage, neighbours
        self._features, self._experts = opened.features, experts
        self._last, self._connection = neighbours.is_last, connection
        # The engine reads one step while one more than there are workers are under way.
        self._most_kept = workers + 2
        # Hidden states of the output rows, by step: the engine may ask for results of these.
        self._kept: OrderedDict[int, torch.Tensor] = OrderedDict()

    def take(self, message: Message) -> None:
        """Compute a step, or answer a question about an earlier one."""
        header = message.header
        if header["type"] == "rows":
            self._answer_rows(header)
        elif header["type"] == "experts":
            self._connection.send(*self._experts.answer(header["ask"]))
        elif header["type"] == "exchange":
            moved = self._experts.move(header["ask"], header["do"], header["arguments"])
            self._connection.send(moved)
        elif header["type"] == "caches":
            self._change_caches(header, message.tensors)
        elif header["type"] == "bytes":
            assert header["do"] in CACHE_READS
            found = getattr(self._stage.cache_files, header["do"])(header["at"])
            self._connection.send({"type": "bytes", "ask": header["ask"]}, [found])
        else:
            self._step(expect(header, "step"), message)

    def _change_caches(self, header: Header, tensors: list[torch.Tensor]) -> None:
        """Move what the caches hold, or fill a part of them with bytes."""
        do = header["do"]
        if do in CACHE_MOVES:
            getattr(self._stage.caches, do)(*header["arguments"])
        else:
            assert do in CACHE_WRITES
            getattr(self._stage.cache_files, do)(*header["arguments"], *tensors)

    def _step(self, header: Header, message: Message) -> None:
        batch = read_batch(header, message.tensors)
        rows, started = len(batch.tokens), time.perf_counter()
        handover_bytes, handover_s, before = 0, 0.0, self._own_times()
        received = self._neighbours.receive(rows)
        got = time.perf_counter()
        told: Header = {"type": "result", "step": header["step"]}
        answer: list[torch.Tensor] = []
        if self._last:
            result = self._stage.step(batch, (), received)
            if header["logits"]:
                answer.append(result.logits(header["logits"]))
            if header["keep"]:
                self._keep(header["step"], result)
            done = time.perf_counter()
        else:
            handed = self._stage.run(batch, received)
            handover_bytes = self._neighbours.send(handed)
            done, handover_s = time.perf_counter(), self._neighbours.last_send_s
        told["waited_s"] = got - started
        told["busy_s"] = done - got - handover_s
        told["handover_bytes"], told["handover_s"] = handover_bytes, handover_s
        own = self._own_times().since(before)
        told["embed_s"], told["head_s"] = own.embed_s, own.head_s
        if self._features is not None:
            answer.append(self._features.first_rows(rows).cpu())
        told["features"] = self._features is not None
        self._connection.send(told, answer)
        self._experts.follow()

    def _own_times(self) -> StageTimes:
        """Return what all steps took so far, as the stage measured it."""
        ((_, times),) = self._stage.times()
        return replace(times)

    def _keep(self, step: int, result: StepResult) -> None:
        self._kept[step] = result.hidden.clone()
        while len(self._kept) > self._most_kept:
            self._kept.popitem(last=False)

    def _answer_rows(self, header: Header) -> None:
        """Send rows of a step that was kept: logits, normed or plain hidden states."""
        hidden = self._kept[header["step"]]
        if header["kind"] != "hidden":
            hidden = hidden[header["rows"]]
        if header["kind"] == "logits":
            hidden = self._stage.logits(hidden).float()
        elif header["kind"] == "normed":
            hidden = self._stage.normed(hidden).float()
        self._connection.send({"type": "rows", "ask": header["ask"]}, [hidden.cpu()])


def own_device(options: Options) -> DeviceSpec:
    """Return the device of this machine that the options name, with its number of threads."""
    device = next(x for x in plan_devices(options) if x.runs_layers)
    cores = options.threads or device.cores or 1
    return replace(device, worker=True, cores=cores)


def connect(address: tuple[str, int], token: str, wait_s: float, timeout_s: float) -> Connection:
    """Connect to an engine, which may not listen yet; both ends prove that they know the token."""
    ends = time.monotonic() + wait_s
    while True:
        try:
            return _proved(
                Connection(socket.create_connection(address, timeout_s), timeout_s), token
            )
        except (OSError, WireError) as error:
            if time.monotonic() > ends:
                host, port = address
                raise EngineGoneError(
                    f"No engine takes workers at {host}:{port}: {error}",
                    hint="Start headroom serve --workers there first, or raise --wait.",
                ) from error
            time.sleep(RETRY_S)


def _proved(connection: Connection, token: str) -> Connection:
    try:
        connection.prove_as_worker(token)
    except BaseException:
        connection.close()
        raise
    return connection


def planned(model: ModelDescription, order: LoadOrder) -> Plan:
    """Make the engine's plan again, and return it; raise ModelError if it differs there."""
    plan = make_plan([model.shape], order.devices, order.options, order.features)
    if order.placement is not None:
        plan = plan.placed([len(ids) for ids in order.placement.hot])
    if plan_digest(plan) != order.plan_digest:
        raise ModelError(
            "The engine's plan and the worker's differ for the same devices and options.",
            hint="Install the same version of headroom on all machines.",
        )
    return plan


def _tell(connection: Connection, error: Exception, *, neighbour: bool = False) -> None:
    """Tell the engine what ended this worker; `neighbour`: another worker was lost first."""
    named = isinstance(error, HeadroomError)
    header = {
        "type": "error",
        "message": error.message if named else f"{type(error).__name__}: {error}",  # type: ignore[attr-defined]
        "hint": error.hint if named else "",  # type: ignore[attr-defined]
        "neighbour": neighbour,
    }
    with suppress(WireError):
        connection.send(header)
