"""Experts in worker processes are counted, exchanged and told of as those of one process."""

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headroom.engine.request import SamplingParams
from headroom.errors import DeviceError
from headroom.experts.exchange import ExchangePolicy, StoreExchanges
from headroom.experts.joined import join_meters, join_readings, join_stores
from headroom.experts.placement import ExpertPlacement, LayerExperts
from headroom.experts.stats import RoutingHistory, RoutingStats, StatsFile, StatsModel
from headroom.experts.store import ExpertStore
from headroom.experts.telemetry import (
    HIT_CAUSES,
    CacheTotals,
    ColdFigures,
    ColdMeter,
    ColdPaces,
    ColdReading,
    DecodeCounts,
    PolicyState,
)
from headroom.families.files import open_checkpoint
from headroom.llm import LLM
from headroom.options import Options
from headroom.plan.describe import describe
from headroom.split.choice import make_worker_plan
from headroom.split.expert_records import ExpertRecords
from headroom.split.pipeline import Pipeline
from headroom.split.placing import find_placement
from headroom.split.upkeep import ExpertUpkeep, ExpertView
from headroom.split.upkeep_rules import UpkeepRules
from headroom.split.wire import Header, Message
from headroom.split.worker_experts import (
    StageExperts,
    WorkerExchanges,
    WorkerExperts,
    WorkerStore,
)
from headroom.split.worker_messages import ColdReport, WorkerLostError, read_reading
from headroom.split.workers import Workers, open_worker_pipeline
from tests.experts.stores import blob_layout, check_layer, small_store
from tests.families.oracles import PROMPT, variant
from tests.split.test_pipeline import SETTINGS, answers, opened
from tests.split.test_upkeep import StatisticsStage
from tests.split.test_workers import pids
from tests.stand_in.gpu import StandInGpu, stand_in_gpu
from tests.stand_in.streams import Queues

LAYERS = (LayerExperts(0, 0), LayerExperts(4, 10), LayerExperts(4, 10))
USED = (0, 2, 2)
LOADED = ((), (0, 1), (0, 1))
POLICY = ExchangePolicy(min_gain=2.0, false_chance=1, per_layer=1)
RULES = UpkeepRules(policy=POLICY)


def over_the_wire(header: Header) -> Header:
    told: Header = json.loads(json.dumps(header))
    return told


@dataclass
class PlayedWorker:
    """A stage with cold experts, as a worker has it."""

    store: ExpertStore
    routing: RoutingStats = field(default_factory=lambda: RoutingStats(3, 4, "cpu"))
    costs: DecodeCounts = field(
        default_factory=lambda: DecodeCounts(0, 1000, hot_s=0.5, wait_s=0.0, cold_s=0.25)
    )

    def __post_init__(self) -> None:
        self.meter = ColdMeter(lambda: self.costs)
        self.exchanges = StoreExchanges(self.store, LAYERS, same_bits=False)
        cold: Any = SimpleNamespace(store=self.store, meter=self.meter, keepers=(), same_bits=False)
        self.told = StageExperts(self.routing, cold, self.exchanges)

    @property
    def report(self) -> ColdReport:
        report = self.told.report()
        assert report is not None
        return ColdReport.read(over_the_wire(asdict(report)))


class PlayedWorkers:
    """Workers that answer at once; what is sent passes through JSON."""

    def __init__(self, workers: Sequence[PlayedWorker]) -> None:
        self.workers, self.starts, self.lost = [*workers], 1, False
        self.answers: dict[tuple[str, int, int], Message] = {}
        self.moves: list[tuple[int, str, tuple[int, ...]]] = []

    @property
    def count(self) -> int:
        return len(self.workers)

    def ask(self, number: int, header: Header) -> int:
        if self.lost:
            raise WorkerLostError("gone")
        sent, told = over_the_wire(header), self.workers[number].told
        asked = len(self.answers) + 1
        if sent["type"] == "experts":
            found = told.answer(asked)
        else:
            self.moves.append((number, sent["do"], tuple(sent["arguments"])))
            found = Message(told.move(asked, sent["do"], sent["arguments"]), [])
        self.answers[sent["type"], number, asked] = Message(
            over_the_wire(found.header), found.tensors
        )
        return asked

    def ask_all(self, header: Header) -> list[Message]:
        asked = [self.ask(number, header) for number in range(self.count)]
        return [self.answer(header["type"], number, ask) for number, ask in enumerate(asked)]

    def answer(self, kind: str, number: int, asked: int) -> Message:
        return self.answers[kind, number, asked]

    def has_answer(self, kind: str, number: int, asked: int) -> bool:
        return (kind, number, asked) in self.answers


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInGpu]:
    """A GPU whose copies run when somebody waits for them, and between steps."""
    with stand_in_gpu(monkeypatch) as made:
        made.queues.stepped = True
        yield made


def two_workers(gpu: StandInGpu) -> list[PlayedWorker]:
    """Two workers, each with a layer whose experts are half cold."""
    layout = blob_layout(4, (4, 4, 2))
    made = [
        PlayedWorker(small_store(layouts, [*LOADED], "cuda:0", pin=True, cold="gpu"))
        for layouts in ([None, layout, None], [None, None, layout])
    ]
    gpu.queues.finish()
    gpu.kept.append(made)
    return made


def records() -> ExpertRecords:
    file = StatsFile(None, RoutingHistory.empty(LAYERS, 0.0))
    return ExpertRecords(StatsModel(Path("m"), "abc", LAYERS, USED), file, RULES)


def upkeep_of_workers(workers: PlayedWorkers) -> ExpertUpkeep:
    played: Any = workers
    experts = WorkerExperts(played, 3, 4)
    reports = [worker.report for worker in workers.workers]
    store = WorkerStore(experts, reports, ExpertPlacement(LOADED, "drawn"))
    exchanges = WorkerExchanges(played, store, LAYERS, None)
    stage = StatisticsStage(experts)  # type: ignore[arg-type]
    pipeline = Pipeline([stage], 10, experts=exchanges, meter=experts, store=store)
    return ExpertUpkeep(pipeline, records())


def upkeep_of_stages(stages: Sequence[PlayedWorker]) -> ExpertUpkeep:
    kept = [StatisticsStage(one.routing) for one in stages]
    for stage, one in zip(kept, stages, strict=True):
        stage.kept = one.store
    store = join_stores([one.store for one in stages])
    assert store is not None
    pipeline = Pipeline(
        kept,
        10,
        experts=StoreExchanges(store, LAYERS, same_bits=False),
        meter=join_meters([one.meter for one in stages]),
    )
    return ExpertUpkeep(pipeline, records())


def work(stages: Sequence[PlayedWorker], upkeep: ExpertUpkeep, tokens: int = 20) -> ExpertView:
    """Let the third and fourth expert be chosen, look after the experts, and return a view."""
    for number, stage in enumerate(stages):
        for expert, times in ((0, 1), (1, 3), (2, 9), (3, 5 + number)):
            stage.routing.of_layer(1 + number).decode[expert] += times
        stage.costs = DecodeCounts(500, 3000, hot_s=0.75, wait_s=0.5, cold_s=1.0, by_cpu=7)
    for _ in range(20):
        upkeep.go_on(resting=True)
        if upkeep.due(tokens, resting=True):
            upkeep.run(tokens, resting=True)
        Queues.current().finish()
    for stage in stages:  # these find the experts at their new places
        stage.routing.of_layer(1).prefill[:2] += 3
    asked = upkeep.ask_view()
    upkeep.run(tokens, resting=True)
    return asked.result(timeout=0)


def test_upkeep_does_and_tells_of_workers_what_it_does_of_stages_in_one_process(
    gpu: StandInGpu,
) -> None:
    there, here = two_workers(gpu), two_workers(gpu)
    view = work(there, upkeep_of_workers(PlayedWorkers(there)))
    assert view == work(here, upkeep_of_stages(here))
    assert [layer.hot for layer in view.layers[1:]] == [(False, False, True, True)] * 2
    assert view.telemetry.exchanges == 4
    assert view.telemetry.seconds == {"hot": 0.5, "cold": 1.5, "wait": 1.0}
    for number, worker in enumerate(there):
        check_layer(worker.store, 1 + number)


def test_each_exchange_goes_to_the_worker_that_has_the_layer(gpu: StandInGpu) -> None:
    there = two_workers(gpu)
    workers = PlayedWorkers(there)
    work(there, upkeep_of_workers(workers))
    begun = [(number, moved) for number, do, moved in workers.moves if do == "begin"]
    assert begun
    assert all(layer == 1 + number for number, (layer, *_) in begun)
    one = [do for number, do, _ in workers.moves if number == 0 and do != "ready"]
    assert one[:3] == ["begin", "turn", "end"]


def test_copies_that_run_are_asked_for_and_nobody_waits(gpu: StandInGpu) -> None:
    workers: Any = PlayedWorkers(two_workers(gpu))
    store = WorkerStore(
        WorkerExperts(workers, 3, 4),
        [worker.report for worker in workers.workers],
        ExpertPlacement(LOADED, "drawn"),
    )
    exchanges = WorkerExchanges(workers, store, LAYERS, None)
    exchanges.begin(2, 3, 0)
    assert not exchanges.ready()
    Queues.current().finish()
    assert exchanges.ready()
    exchanges.turn()
    exchanges.end()
    assert exchanges.placement().hot == ((), (0, 1), (1, 3))


def test_an_exchange_that_fails_in_a_worker_ends_the_round_with_its_reason(
    gpu: StandInGpu, caplog: pytest.LogCaptureFixture
) -> None:
    there = two_workers(gpu)
    workers = PlayedWorkers(there)
    upkeep = upkeep_of_workers(workers)

    def fail() -> None:
        raise DeviceError("no memory")

    there[0].exchanges.turn = fail  # type: ignore[method-assign]
    view = work(there, upkeep)
    assert view.telemetry.exchanges == 0
    assert [layer.hot for layer in view.layers[1:]] == [(True, True, False, False)] * 2
    assert "exchanges: one failed and there are no more" in caplog.text
    assert "Worker 1: DeviceError: no memory" in caplog.text


def test_experts_are_where_they_were_loaded_after_workers_were_started_again(
    gpu: StandInGpu,
) -> None:
    there = two_workers(gpu)
    workers = PlayedWorkers(there)
    upkeep = upkeep_of_workers(workers)
    before = work(there, upkeep)
    workers.lost = True
    assert upkeep.read() == before.telemetry  # what was told last
    workers.workers, workers.lost, workers.starts = two_workers(gpu), False, 2
    upkeep.begin_again()
    asked = upkeep.ask_view()
    upkeep.run(20, resting=True)
    view = asked.result(timeout=0)
    assert [layer.hot for layer in view.layers[1:]] == [(True, True, False, False)] * 2
    assert view.telemetry.hits == before.telemetry.hits
    again = work(workers.workers, upkeep, tokens=40)
    assert again.telemetry.exchanges > before.telemetry.exchanges
    assert again.telemetry.picks == tuple(2 * picks for picks in before.telemetry.picks)
    assert again.telemetry.cold_bytes["cpu"] == 2 * before.telemetry.cold_bytes["cpu"]
    for number, worker in enumerate(workers.workers):
        check_layer(worker.store, 1 + number)


def test_a_loss_in_a_round_ends_the_round_and_not_all_exchanges(gpu: StandInGpu) -> None:
    there = two_workers(gpu)
    workers = PlayedWorkers(there)
    upkeep = upkeep_of_workers(workers)
    there[0].routing.of_layer(1).decode[3] += 9
    upkeep.run(5, resting=True)  # begins an exchange
    workers.lost = True
    upkeep.go_on(resting=True)
    upkeep.run(6, resting=True)
    workers.workers, workers.lost, workers.starts = two_workers(gpu), False, 2
    upkeep.begin_again()
    assert work(workers.workers, upkeep).telemetry.exchanges > 0


def test_all_costs_arrive_as_they_were_sent() -> None:
    cache = CacheTotals(
        used=(False, True),
        hits=(0, 9),
        causes=(dict.fromkeys(HIT_CAUSES, 0), dict.fromkeys(HIT_CAUSES, 3)),
        linked=(0, 4),
        filled=(0, 2),
    )
    sent = ColdReading(
        figures=ColdFigures({"gpu": 7, "cpu": 8}, {"hot": 0.5, "copies": 0.25}, linked=3, by_cpu=4),
        pick_bytes=(0, 80),
        cache=cache,
        cache_bytes=(0, 90),
        paces=ColdPaces(cpu_share=0.5, cpu=1.0, cpu_prompts=0.75, link=0.5),
        policy=PolicyState("lru", {"lru": 0.75}),
    )
    for reading in (sent, ColdReading()):
        assert read_reading(over_the_wire(asdict(reading))) == reading
    assert join_readings([sent]) == sent


# A worker process whose machine seems to have a GPU.
ON_STAND_IN = """
import pytest
from headroom.cli.main import main
from tests.stand_in.gpu import stand_in_gpu
with stand_in_gpu(pytest.MonkeyPatch()):
    main()
"""


@pytest.mark.slow
def test_processes_with_cold_experts_exchange_them_and_answer_as_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headroom.split.workers.RUN", ("-c", ON_STAND_IN))
    monkeypatch.setattr("headroom.split.choice.check_devices", lambda *given: None)
    # Copies of so few bytes take longer than what they save.
    for module in ("workers", "launch"):
        monkeypatch.setattr(f"headroom.split.{module}.exchange_speeds", lambda *given: None)
    path = variant("qwen35moe").save_gguf(tmp_path / "m.gguf")
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
    settings: dict[str, Any] = {
        "context": 64, "parallel": 2, "chunk": 10, "dtype": "f32", "kv_type": "f32", "threads": 1,
        "expert_budget": "40%", "kernels": "reference", "routing_stats": "off",
        "swap_min_gain": 0.5, "swap_false_chance": 1.0,
    }  # fmt: skip

    def ask(llm: LLM, lose: bool) -> tuple[list[Any], list[ExpertView]]:
        found, views = [], []
        for prompt in (PROMPT[:8], PROMPT[3:9], PROMPT[:8]):
            (answer,) = llm.generate([prompt], params)
            found.append((answer.token_ids, answer.logprobs))
            assert answer.timings.experts is not None
            assert answer.timings.experts["cold_picks"] > 0  # type: ignore[operator]
            views.append(resting(llm))
            if lose and len(views) == 1:
                os.kill(pids(llm)[1], signal.SIGKILL)
                while not llm.engine.trouble:
                    time.sleep(0.01)
        return found, views

    with LLM(str(path), **settings, device="cuda:0,cuda:0") as here:
        one, seen = ask(here, lose=False)
    with LLM(str(path), **settings, device="cuda:0", workers="2") as there:
        two, told = ask(there, lose=True)
    assert two == one
    first, last = told[0], told[-1]
    assert first.telemetry.exchanges == seen[0].telemetry.exchanges > 0
    assert [layer.hot for layer in first.layers] == [layer.hot for layer in seen[0].layers]
    assert first.telemetry.hits == seen[0].telemetry.hits
    assert last.telemetry.exchanges > first.telemetry.exchanges  # after the restart, too
    assert last.telemetry.picks == seen[-1].telemetry.picks


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3moe", "gemma4-26b"])
def test_processes_with_cold_experts_give_the_tokens_of_one_in_every_way_of_drawing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("headroom.split.workers.RUN", ("-c", ON_STAND_IN))
    checkpoint = open_checkpoint(variant(name).save_gguf(tmp_path / "m.gguf"))
    given = {"kernels": "reference", "expert_budget": "60%"}
    prompts = [PROMPT[start : start + 2 + 3 * start] for start in range(8)]
    whole = answers(*opened(checkpoint, device="cuda:0", **given), prompts, together=False)
    settings: dict[str, Any] = {**SETTINGS, **given, "device": "cuda:0", "workers": "2"}
    options, model = Options(**settings), describe(checkpoint)
    workers = Workers(options)
    workers.start()
    plan = make_worker_plan(model.shape, workers.devices, options)
    placement = find_placement(model.shape, plan, options, checkpoint.identity)
    assert placement is not None
    pipeline = open_worker_pipeline(workers, plan, model, options, placement=placement)
    assert pipeline.store is not None
    assert sum(layer is not None for layer in pipeline.store.layers) > 1
    assert answers(plan, pipeline, prompts, together=True) == whole


def resting(llm: LLM) -> ExpertView:
    """Return the experts once no exchange is left to do."""
    counts = [-1]
    while True:
        asked = llm.engine.view_experts()
        assert asked is not None
        view = asked.result(timeout=60)
        counts.append(view.telemetry.exchanges)
        if counts[-1] == counts[-2]:
            return view
        time.sleep(0.5)
